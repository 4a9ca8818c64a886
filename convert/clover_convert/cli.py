"""The command `clover-convert`."""

import pathlib
import signal
import sys

import click

from clover_convert.conversion import convert
from clover_convert.encodings import ENCODINGS
from clover_cpp.errors import CloverError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if quiet or not sys.stderr.isatty():
            size = convert(checkpoint, output, type_)
        else:
            with click.progressbar(length=1, label=output.name, file=sys.stderr) as bar:
                size = convert(checkpoint, output, type_, progress=lambda done, total: _show(bar, done, total))
    except CloverError as error:
        click.echo(f"clover-convert: error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("clover-convert: interrupted, nothing was written", err=True)
        sys.exit(130)
    if not quiet:
        click.echo(f"{output}: {type_}, {size / 1e6:.1f} MB")


def _show(bar, done, total):
    bar.length = total
    bar.update(done - bar.pos)
