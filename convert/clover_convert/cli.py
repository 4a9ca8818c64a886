"""The command `clover-convert`."""

import os
import pathlib
import signal
import sys
import unicodedata

import click

from clover_convert.conversion import convert
from clover_convert.encodings import ENCODINGS
from clover_cpp.errors import CloverError

PROGRAM = "clover-convert"
INTERRUPTED = 128 + signal.SIGINT


class Command(click.Command):
    """A command whose every error is one line."""

    def main(self, *args, **kwargs):
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
            sys.exit(code if isinstance(code, int) else 0)
        except click.ClickException as error:
            _fail(f"{error.format_message()} (see {PROGRAM} --help)", error.exit_code)
        except CloverError as error:
            _fail(str(error), 1)
        except (click.Abort, KeyboardInterrupt):
            print(f"{PROGRAM}: interrupted, nothing was written", file=sys.stderr)
            sys.exit(INTERRUPTED)


def _fail(message, code):
    print(f"{PROGRAM}: error: {_printable(message)}", file=sys.stderr)
    sys.exit(code)


def _report(text):
    """Print a line; a standard output that takes none (a closed pipe, a full disk) is an error like others."""
    try:
        if sys.stdout:
            sys.stdout.reconfigure(errors="replace")
            print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
        _fail(f"cannot write to standard output: {error.strerror}", 1)


def _printable(text):
    """Text of one line, without what a terminal would obey or UTF-8 cannot hold: names come from files."""
    return "".join("\ufffd" if unicodedata.category(char) in ("Cc", "Cs") else char for char in text)


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("checkpoint", type=click.Path(path_type=pathlib.Path))
@click.argument("output", type=click.Path(path_type=pathlib.Path))
@click.option(
    "--type", "-t", "type_", type=click.Choice(list(ENCODINGS)), default="q8_0", show_default=True, help="Type of the matrices."
)
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
def main(checkpoint, output, type_, quiet):
    """Convert CHECKPOINT, a folder with config.json, *.safetensors and tokenizer.json, to the GGUF file OUTPUT.

    \b
    Example:
        clover-convert models/clover-tiny clover-tiny.gguf --type q8_0
    """
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    if quiet or not sys.stderr.isatty():
        size = convert(checkpoint, output, type_)
    else:
        with click.progressbar(length=1, label=_printable(output.name), file=sys.stderr) as bar:
            size = convert(checkpoint, output, type_, progress=lambda done, total: _show(bar, done, total))
    if not quiet:
        _report(f"{_printable(str(output))}: {type_}, {size / 1e6:.1f} MB")


def _show(bar, done, total):
    bar.length = total
    bar.update(done - bar.pos)
