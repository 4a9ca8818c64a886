"""The command `clover-quantize imatrix`."""

import pathlib

import click

from clover_cpp import command, outputs
from clover_quant import shards
from clover_quant.collection import MODES, collect
from clover_quant.passes import RATIOS
from clover_quant.progress import shown


def ratios(context, parameter, text):
    """Comma-separated numbers as a tuple, for click."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is no list of numbers such as 1,0.5") from None


RATIOS_OPTION = click.option(
    "--ratios", default=",".join(f"{ratio:g}" for ratio in RATIOS), show_default=True, callback=ratios,
    help="Parts of a block's positions that are masked, in turn.",
)  # fmt: skip


@click.command("imatrix")
@click.argument("model", type=click.Path(path_type=pathlib.Path))
@click.argument("text", type=click.Path(path_type=pathlib.Path))
@click.option("--output", "-o", type=click.Path(path_type=pathlib.Path), default="imatrix.gguf", show_default=True)
@click.option("--context", default=512, show_default=True, type=click.IntRange(1), help="Tokens of a chunk.")
@click.option("--chunks", type=click.IntRange(1), help="Most chunks; default: the whole text.")
@click.option("--mode", type=click.Choice(MODES), default="both", show_default=True, help="Kinds of passes that count.")
@RATIOS_OPTION
@click.option("--seed", default=0, show_default=True, help="Of the masked positions.")
@click.option("--threads", type=click.IntRange(0, 512), default=0, help="0, the default: all cores.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
def imatrix_command(model, text, output, context, chunks, mode, ratios, seed, threads, quiet):
    """Collect an importance matrix: MODEL (a GGUF file, best BF16) evaluates TEXT by causal passes and by masked blocks.

    The output is llama.cpp's GGUF format, for clover-convert --imatrix and for llama-quantize.
    """
    outputs.check(output, [*shards.paths(model), text])
    with shown("chunks", quiet) as progress:
        found = collect(model, text, context, chunks, mode, ratios, seed, threads, progress)
    found.save(output, context)
    if not quiet:
        rarely = sum(int((counts == 0).sum()) for counts in found.counts.values())
        unseen = f"; {rarely} expert matrices were never chosen: more text would reach them" if rarely else ""
        command.report("clover-quantize", f"{output}: {len(found.sums)} tensors from {found.chunks} chunks of {context}{unseen}")
