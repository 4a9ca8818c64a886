"""The demo: convert the bundled checkpoint, answer a held-out task by block diffusion and autoregressively, and compare."""

import argparse
import json
import pathlib
import sys

from rich.console import Console
from rich.table import Table

from clover_convert import convert
from clover_cpp import Clover, CloverError, Step, live

from . import tasks
from .evaluate import CHECKPOINT, answer, begin

BUILD = pathlib.Path(__file__).parents[2] / "build"
SEED = "demo"
TIMED = 5  # runs of each mode that are timed; the median counts


def reveal(clover, example, console):
    """Show the block-diffusion answer as it comes about; on a terminal in place, else one line a pass."""
    events = begin(clover, example, "block", events=True)
    if console.is_terminal:
        live.show(clover, events)
        return
    view = live.View(clover.detokenize)
    for event in events:
        view.update(event)
        if isinstance(event, Step):
            kind = f"block {event.block}, pass {event.step}" if event.step else f"block {event.block}, given"
            console.print(f"{kind:17}" + view.__rich__().plain.replace("\n", "⏎"), soft_wrap=True)


def measure(clover, example):
    """{mode: (text, statistics) of the run with the median time}, the modes run in turn."""
    runs = {"block": [], "ar": []}
    for _ in range(TIMED):
        for mode, done in runs.items():
            clover.clear()
            done.append(answer(clover, example, mode))
    return {mode: sorted(done, key=lambda run: run[1].seconds)[TIMED // 2] for mode, done in runs.items()}


def compare(results, example, console):
    """Print both answers side by side with their figures."""
    table = Table("", "block diffusion", "autoregressive", show_lines=True)
    rows = {
        "answer": lambda text, stats: text,
        "exactly right": lambda text, stats: "yes" if example.exact(text) else "NO",
        "tokens": lambda text, stats: str(stats.tokens),
        "passes": lambda text, stats: str(passes(stats)),
        "tokens per step": lambda text, stats: f"{stats.tokens_per_step:.2f}",
        "seconds": lambda text, stats: f"{stats.seconds:.4f}",
    }
    for name, cell in rows.items():
        table.add_row(name, *(cell(*results[mode]) for mode in ("block", "ar")))
    console.print(table)
    ratio = results["ar"][1].seconds / results["block"][1].seconds
    console.print(
        f"Autoregressive time / block-diffusion time: {ratio:.2f} (same weights, same engine, run in turn, medians of {TIMED})"
    )


def passes(stats):
    """Passes of the model after the prompt."""
    return stats.block_passes + stats.commit_passes + stats.causal_passes


def main():
    """Command line of scripts/demo."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--task", default="tools", choices=list(tasks.TASKS))
    parser.add_argument("--example", type=int, default=0, help="which held-out example of the task")
    parser.add_argument("--type", default="q8_0", help="type of the weights, as clover-convert --outtype")
    args = parser.parse_args()
    if args.example < 0:
        parser.error("--example must be 0 or more")
    console = Console(highlight=False, markup=False)
    example = tasks.held_out(args.task, args.example + 1, SEED)[args.example]
    gguf = BUILD / "demo" / f"clover-tiny-{args.type}.gguf"
    gguf.parent.mkdir(parents=True, exist_ok=True)
    convert(CHECKPOINT, gguf, type=args.type)
    console.print(f"Converted models/clover-tiny to {gguf.relative_to(BUILD.parent)} ({gguf.stat().st_size / 1e6:.1f} MB)\n")
    with Clover(gguf) as clover:
        console.print("The prompt, a held-out example that training never saw:\n")
        console.print(clover.render(example.messages, example.tools, example.thinking), style="dim")
        console.print("The answer by block diffusion, 32 positions at once:\n")
        reveal(clover, example, console)
        console.print()
        results = measure(clover, example)
    compare(results, example, console)
    if args.json:
        report = {"task": args.task, "exact": all(example.exact(text) for text, _ in results.values())}
        for mode, (_, stats) in results.items():
            report[mode] = {"tokens": stats.tokens, "passes": passes(stats), "seconds": round(stats.seconds, 6)}
        print(json.dumps(report))


if __name__ == "__main__":
    try:
        main()
    except CloverError as error:
        sys.exit(f"scripts/demo: error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
