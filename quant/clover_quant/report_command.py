"""The command `clover-quantize report`."""

import json
import pathlib

import click

from clover_cpp import command, outputs
from clover_quant import shards
from clover_quant.imatrix_command import RATIOS_OPTION
from clover_quant.progress import shown
from clover_quant.report import Settings, report
from clover_quant.report_output import figure_class, markdown, plot

PATH = click.Path(path_type=pathlib.Path)


@click.command("report")
@click.argument("base", type=PATH)
@click.argument("models", type=PATH, nargs=-1, required=True)
@click.option("--text", type=PATH, required=True, help="Text that the models are compared on.")
@click.option("--tasks", type=PATH, help='JSON lines: {"messages": [...], "tools": [...], "thinking": bool, "expected": "text"}.')
@click.option("--json", "json_path", type=PATH, help="Write all figures.")
@click.option("--markdown", "markdown_path", type=PATH, help="Write the table (else it is printed).")
@click.option("--plot", "plot_path", type=PATH, help="Write a picture (.png, .svg).")
@click.option("--context", default=512, show_default=True, type=click.IntRange(1), help="Tokens of a chunk of the text.")
@click.option("--chunks", type=click.IntRange(1), help="Most chunks; default: the whole text.")
@RATIOS_OPTION
@click.option("--threshold", type=click.FloatRange(0, 1), help="Confidence above which a position is fixed; default: the model's.")
@click.option("--seed", default=0, show_default=True, help="Of the masked positions.")
@click.option("--threads", type=click.IntRange(0, 512), default=0, help="0, the default: all cores.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing but errors.")
def report_command(
    base, models, text, tasks, json_path, markdown_path, plot_path, context, chunks, ratios, threshold, seed, threads, quiet
):
    """What quantisation costs: MODELS against BASE (GGUF files of the same model, BASE in BF16).

    \b
    KL divergence and equal first choices on causal passes and on masked blocks; commit flips: positions fixed to another token
    than the base's choice; tokens per step and exact answers on tasks; size; time of a pass relative to the base's.

    \b
    Example:
        clover-quantize report bf16.gguf q4_k_m.gguf edge_q4.gguf --text text.txt --plot report.png
    """
    inputs = [file for model in (base, *models) for file in shards.paths(model)] + [text] + ([tasks] if tasks else [])
    outputs.check_all([path for path in (json_path, markdown_path, plot_path) if path], inputs)
    if plot_path:
        figure_class(plot_path)
    settings = Settings(context, chunks, ratios, threshold, seed, threads)
    with shown("models", quiet) as progress:
        found = report(base, models, text, tasks, settings, progress)
    table = markdown(found)
    if json_path:
        outputs.replace(json_path, lambda path: path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8"))
    if markdown_path:
        outputs.replace(markdown_path, lambda path: path.write_text(table, encoding="utf-8"))
    elif not quiet:
        command.report("clover-quantize", table.rstrip("\n"))
    if plot_path:
        outputs.replace(plot_path, lambda path: plot(found, path))
