"""The command `clover-convert`."""

import pathlib
import signal
import sys

import click
from click.core import ParameterSource

from clover_convert.checkpoint import Checkpoint
from clover_convert.conversion import outline, prepare, read, run
from clover_convert.partial import partial_path
from clover_convert.progress import shown
from clover_convert.tensors import skipped
from clover_cpp import command
from clover_cpp.command import printable
from clover_quant import fit, recipes, shards
from clover_quant.imatrix import Imatrix

PROGRAM = "clover-convert"


class Command(command.Main, click.Command):
    """The command; an interruption names what it has left."""

    program = PROGRAM
    output = None

    def interrupted(self):
        """What is said when it was interrupted."""
        part = self.output and partial_path(self.output)
        if part and part.exists():
            return f"interrupted, what is done is kept in {printable(str(part))}: continue with --resume"
        return "interrupted, nothing was written"


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("checkpoint")
@click.argument("output", type=click.Path(path_type=pathlib.Path))
@click.option(
    "--outtype", "--type", "-t", default="q8_0", show_default=True,
    help=f"Recipe ({', '.join(recipes.names())}), type of all matrices (f32, f16, bf16, q4_k, ...), or a recipe's path (.toml).",
)  # fmt: skip
@click.option("--imatrix", type=click.Path(path_type=pathlib.Path), help="Importance matrix, a GGUF file.")
@click.option("--fit", "limit", metavar="SIZE", help="Choose the best recipe that runs within this memory (16GB, 8GiB).")
@click.option("--context", default=8192, show_default=True, help="Tokens of context that --fit counts with.")
@click.option("--split-max-size", metavar="SIZE", help="Several files, of at most this size of tensors each (5G, 500M).")
@click.option("--resume", is_flag=True, help="Go on where an interrupted run stopped.")
@click.option("--verify", is_flag=True, help="Read the result back and compare every tensor with its source.")
@click.option("--dry-run", is_flag=True, help="Print what would be written: each tensor, from, to, bytes.")
@click.option("--allow-non-finite", is_flag=True, help="Convert NaN and infinite weights too (to 0 in types of blocks).")
@click.option("--threads", type=click.IntRange(0, 512), default=0, help="0, the default: all cores.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
def main(
    checkpoint,
    output,
    outtype,
    imatrix,
    limit,
    context,
    split_max_size,
    resume,
    verify,
    dry_run,
    allow_non_finite,
    threads,
    quiet,
):
    """Convert CHECKPOINT to the GGUF file OUTPUT, quantised, in one pass.

    CHECKPOINT: a folder with config.json, *.safetensors and a tokenizer, or a repo id (ORG/NAME or ORG/NAME@REVISION).

    \b
    Examples:
        clover-convert models/clover-tiny clover-tiny.gguf --outtype q4_k_m
        clover-convert big-checkpoint big.gguf --fit 16GB --context 32768
    """
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _ended)
    main.output = output
    _check_usage(output)
    say = (lambda text: None) if quiet else _say
    matrix = Imatrix.load(imatrix) if imatrix else None
    split = fit.parse_size(split_max_size) if split_max_size is not None else None
    size = fit.parse_size(limit) if limit is not None else None
    with Checkpoint(checkpoint) as opened:
        recipe = None if size else recipes.load(outtype)
        source = read(opened)
        job = prepare(source, recipe or _fitting(source, size, context, matrix, say), matrix, split)
        job.check_output(output)
        for line in skipped(opened.tensors, job.config):
            say(f"skipped: {line}")
        _warn_of(job, output, split)
        if dry_run:
            _print_plan(job, _say)
            return
        with shown(printable(output.name), quiet) as progress:
            result = run(job, output, resume, verify, allow_non_finite, threads, progress)
    for name, odd in result.odd.items():
        _warn(f"tensor {name} has values that are not finite: {odd}")
    for path in result.paths:
        say(f"{printable(str(path if len(result.paths) > 1 else output))}: {job.recipe.name}, {path.stat().st_size / 1e6:.1f} MB")
    if result.worst:
        say(f"verified: every tensor is within its type's bound; {result.worst.name} comes closest, {result.worst.ratio:.0%} of it")


def _check_usage(output):
    context = click.get_current_context()
    given = {name for name in context.params if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    if str(output) == "-":
        raise click.UsageError("'-' as OUTPUT: a GGUF file is not written to standard output")
    if {"limit", "outtype"} <= given:
        raise click.UsageError("--fit chooses the recipe: it does not go with --outtype")
    if "context" in given and "limit" not in given:
        raise click.UsageError("--context is what --fit counts with: give --fit too")


def _warn_of(job, output, split):
    lacking = job.without_importance()
    if lacking:
        _warn(f"the importance matrix has nothing of {len(lacking)} matrices, such as {lacking[0]}")
    larger = [shard for shard in job.shards if split and sum(entry.padded for entry in shard.entries) > split]
    if larger:
        _warn(f"{len(larger)} of {len(job.shards)} files are larger than --split-max-size: a tensor is not divided")
    older = shards.others(job.paths(output)[0])
    if older:
        _warn(f"{older[0]} is of a split into another number of files, and stays")


def _say(text):
    command.report(PROGRAM, text)


def _warn(text):
    print(f"{PROGRAM}: warning: {printable(text)}", file=sys.stderr)


def _ended(number, _):
    main.stopped_by = number
    raise KeyboardInterrupt


def _fitting(source, limit, context, matrix, say):
    name, needed = fit.choose(limit, context, lambda name: outline(source, recipes.load(name), matrix))
    say(f"{name} fits into {fit.size_text(limit)}: {needed}")
    return recipes.load(name)


def _print_plan(job, say):
    for target in job.targets:
        tensor, sources = target.tensor, sorted({source.dtype for source, *_ in target.tensor.pieces})
        shape = " x ".join(map(str, tensor.shape))
        say(f"{tensor.name:40} {shape:20} {'/'.join(sources):8} -> {target.kind.name:8} {target.size:14,}")
    files = f" in {len(job.shards)} files" if len(job.shards) > 1 else ""
    say(f"{len(job.targets)} tensors, recipe {job.recipe.name}: {job.size:,} bytes{files}")
