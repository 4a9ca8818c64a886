"""What the commands share: every error is one line on standard error, with the exit codes 1, 2 (usage) and 128 + signal."""

import os
import signal
import sys
import unicodedata

import click

from .errors import CloverError

INTERRUPTED = 128 + signal.SIGINT


def printable(text):
    """Text of one line, without what a terminal would obey or UTF-8 cannot hold: names come from files."""
    return "".join("\ufffd" if unicodedata.category(char) in ("Cc", "Cs") else char for char in text)


def fail(program, message, code=1):
    """End the program with one line."""
    print(f"{program}: error: {printable(message)}", file=sys.stderr)
    sys.exit(code)


class Main:
    """Mixed into a click command or group: it runs as the program `program`."""

    program = "clover"

    def main(self, *args, **kwargs):
        """Run the command line and exit."""
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
            sys.exit(code if isinstance(code, int) else 0)
        except click.ClickException as error:
            fail(self.program, f"{error.format_message()} (see {self.program} --help)", error.exit_code)
        except CloverError as error:
            fail(self.program, str(error))
        except (click.Abort, KeyboardInterrupt):
            print(f"{self.program}: {self.interrupted()}", file=sys.stderr)
            sys.exit(INTERRUPTED)

    def interrupted(self):
        """What is said when it was interrupted."""
        return "interrupted"


def report(program, text):
    """Print a line; a standard output that takes none (a closed pipe, a full disk) is an error like others."""
    try:
        if sys.stdout:
            sys.stdout.reconfigure(errors="replace")
            print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
        fail(program, f"cannot write to standard output: {error.strerror}")
