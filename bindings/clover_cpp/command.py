"""What the commands share: every error is one line on standard error, with the exit codes 1, 2 (usage) and 128 + signal."""

import os
import signal
import sys
import unicodedata

import click

from .errors import CloverError


def printable(text, keep=""):
    """Text without what a terminal would obey or UTF-8 cannot hold (names come from files); `keep`: characters that stay."""
    return "".join("\ufffd" if unicodedata.category(char) in ("Cc", "Cs") and char not in keep else char for char in text)


def fail(program, message, code=1):
    """End the program with one line."""
    print(f"{program}: error: {printable(message)}", file=sys.stderr)
    sys.exit(code)


class Main:
    """Mixed into a click command or group: it runs as the program `program`."""

    program = "clover"
    needs_output = False  # whether it refuses to start with a closed standard output
    stopped_by = signal.SIGINT  # the signal that stands behind a KeyboardInterrupt

    def main(self, *args, **kwargs):
        """Run the command line and exit."""
        if sys.stderr is None:  # closed; print would take standard output instead
            sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
        try:
            if sys.stdout is None and self.needs_output:
                fail(self.program, "standard output is closed")
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
            if sys.stdout:
                sys.stdout.flush()
            sys.exit(code if isinstance(code, int) else 0)
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx else self.program
            fail(self.program, f"{error.format_message()} (see {path} --help)", error.exit_code)
        except click.ClickException as error:
            fail(self.program, error.format_message())
        except CloverError as error:
            fail(self.program, str(error))
        except BrokenPipeError:
            _drop_output()
            sys.exit(1)
        except (click.Abort, KeyboardInterrupt):
            print(f"{self.program}: {self.interrupted()}", file=sys.stderr)
            sys.exit(128 + self.stopped_by)
        except OSError as error:
            fail(self.program, str(error))

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
        _drop_output()
        fail(program, f"cannot write to standard output: {error.strerror}")


def _drop_output():
    """Discard what the interpreter would flush once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
