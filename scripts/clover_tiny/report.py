"""Quality report of the bundled model: converts it by each recipe, and compares with the BF16 weights.

Calibration text, report text and tasks come from three separate held-out seeds.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from clover_convert import convert
from clover_cpp import Clover, CloverError
from clover_quant import recipes
from clover_quant.imatrix import Imatrix

from . import tasks
from .evaluate import CHECKPOINT

ROOT = pathlib.Path(__file__).parents[2]
BUILD = ROOT / "build" / "report"
KINDS = ("tools", "notices", "chat")
END = "<|im_end|>\n"


def text(clover, count, seed):
    """Examples of every kind as the model sees them, answers included, one after the other."""
    drawn = [example for kind in KINDS for example in tasks.held_out(kind, count, seed)]
    rendered = [(clover.render(example.messages, example.tools, example.thinking), example.answer) for example in drawn]
    return "".join(prompt + answer + END for prompt, answer in rendered)


def task_lines(count):
    """Held-out tasks as JSON lines for the report."""
    for kind in KINDS:
        for example in tasks.held_out(kind, count, "report tasks"):
            fields = {"messages": example.messages, "tools": example.tools, "thinking": example.thinking}
            yield json.dumps({**fields, "expected": example.answer}) + "\n"


def quantize(*arguments):
    """Run clover-quantize; ends the program where it fails."""
    done = subprocess.run([sys.executable, "-m", "clover_quant", *map(str, arguments)])
    if done.returncode:
        sys.exit(done.returncode)


def main():
    """Command line of scripts/report."""
    parser = argparse.ArgumentParser(prog="scripts/report", description=__doc__)
    parser.add_argument("--recipes", default=",".join(recipes.names()), help="comma-separated")
    parser.add_argument("--tasks", type=int, default=60, help="tasks of each kind")
    parser.add_argument("--texts", type=int, default=40, help="examples of each kind in the text")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "docs", help="folder of quantisation.{json,md,png}")
    args = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    args.output.mkdir(parents=True, exist_ok=True)
    base = BUILD / "bf16.gguf"
    convert(CHECKPOINT, base, "bf16")
    calibration, held_out, task_file, imatrix = (
        BUILD / name for name in ("calibration.txt", "text.txt", "tasks.jsonl", "imatrix.gguf")
    )
    with Clover(base) as clover:
        calibration.write_text(text(clover, args.texts, "report calibration"))
        held_out.write_text(text(clover, args.texts, "report text"))
    task_file.write_text("".join(task_lines(args.tasks)))
    quantize("imatrix", base, calibration, "-o", imatrix)
    matrix, files = Imatrix.load(imatrix), []
    for name in args.recipes.split(","):
        for suffix, importance in (("", None), ("+imatrix", matrix)):
            if importance is None or name != "q8_0":  # its quantiser does not look at importance
                files.append(BUILD / f"{name}{suffix}.gguf")
                convert(CHECKPOINT, files[-1], name, imatrix=importance)
    out = args.output / "quantisation"
    outputs = ["--json", out.with_suffix(".json"), "--markdown", out.with_suffix(".md"), "--plot", out.with_suffix(".png")]
    quantize("report", base, *files, "--text", held_out, "--tasks", task_file, *outputs)


if __name__ == "__main__":
    try:
        main()
    except CloverError as error:
        sys.exit(f"scripts/report: error: {error}")
