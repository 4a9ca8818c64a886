"""The command `clover-quantize`."""

import pathlib

import click

from clover_cpp import command
from clover_quant import fit, recipes
from clover_quant.imatrix_command import imatrix_command
from clover_quant.model_file import read
from clover_quant.report_command import report_command

PROGRAM = "clover-quantize"


class Commands(command.Main, click.Group):
    """The group `clover-quantize`."""

    program = PROGRAM


@click.group(cls=Commands, no_args_is_help=False, context_settings={"help_option_names": ["-h", "--help"]})
def main():
    """Recipes, the memory a model takes, importance matrices and quality reports.

    \b
    clover-quantize recipes                    # those shipped; clover-convert --outtype NAME uses one
    clover-quantize recipes q4_k_m             # one of them, to start one's own from
    clover-quantize fit model.gguf --context 32768
    clover-quantize fit model.gguf --fit 16GB
    clover-quantize imatrix bf16.gguf text.txt -o imatrix.gguf
    clover-quantize report bf16.gguf q4_k_m.gguf iq4_xs.gguf --text text.txt
    """


main.add_command(imatrix_command)
main.add_command(report_command)


def _say(text):
    command.report(PROGRAM, text)


@main.command("recipes")
@click.argument("name", required=False)
def recipes_command(name):
    """List the shipped recipes, the best first; or print the file of NAME."""
    if name is None:
        for shipped in recipes.by_rank():
            _say(f"{shipped:10}  {recipes.load(shipped).description}")
    else:
        _say(recipes.source(name).rstrip("\n"))


@main.command("fit")
@click.argument("model", type=click.Path(path_type=pathlib.Path))
@click.option("--context", default=8192, show_default=True, type=click.IntRange(1), help="Tokens of context.")
@click.option("--fit", "limit", metavar="SIZE", help="Tell the best recipe that runs within this memory (16GB, 8GiB).")
def fit_command(model, context, limit):
    """The memory that MODEL, a GGUF file, takes: weights, recurrent state, keys and values, working buffers.

    With --fit: for each recipe, best first, as if MODEL were stored by it (MODEL: BF16, F16 or quantised; its F32 tensors stay).
    """
    metadata, tensors = read(model)
    if limit is None:
        _say(str(fit.memory(metadata, sum(tensor.size for tensor in tensors), context)))
        return
    n_layers = fit.hyperparameter(metadata, "block_count")
    size = fit.parse_size(limit)

    def plan(name):
        kinds = recipes.load(name).types(tensors, n_layers)
        return metadata, sum(kind.row_bytes(tensor.elements) for tensor, kind in zip(tensors, kinds, strict=True))

    name, needed = fit.choose(size, context, plan)
    _say(f"{name} fits into {fit.size_text(size)}: {needed}")
