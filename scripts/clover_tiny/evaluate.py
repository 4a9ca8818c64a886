"""Held-out evaluation of a converted model: exactness, passes and time of block diffusion and of autoregressive decoding.

Both modes run the same weights through the same engine, in turn on each task: `time_ratio` is autoregressive seconds over
block seconds, prompt included, over the tasks in which both gave the same number of answers.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile

from clover_convert import convert
from clover_cpp import Clover, CloverError

from . import tasks, web

CHECKPOINT = pathlib.Path(__file__).parents[2] / "models" / "clover-tiny"
MAX_TOKENS = 320
EVALUATED = ("notices", "tools", "web", "chat")
SEED = "evaluation"


@dataclasses.dataclass
class Run:
    """Of one task in one mode: whether all of it was right; delivered tokens; passes; wall seconds."""

    exact: bool = True
    answers: int = 0
    tokens: int = 0
    steps: int = 0  # passes that decide tokens: denoising, or autoregressive
    commits: int = 0
    seconds: float = 0.0

    def add(self, stats, exact):
        """Count one answer in."""
        self.exact &= exact
        self.answers += 1
        self.tokens += stats.tokens
        self.steps += stats.block_passes + stats.causal_passes
        self.commits += stats.commit_passes
        self.seconds += stats.seconds


def begin(clover, example, mode, events=False):
    """Begin the answer to an example; the conversation held may be continued."""
    return clover.generate(example.messages, mode, MAX_TOKENS, tools=example.tools, enable_thinking=example.thinking, events=events)


def answer(clover, example, mode):
    """The model's answer to one example: (text, statistics)."""
    return "".join(begin(clover, example, mode)), clover.stats


def single(clover, example, mode):
    """A task of one answer."""
    run = Run()
    clover.clear()
    text, stats = answer(clover, example, mode)
    run.add(stats, example.exact(text))
    return run


def web_loop(clover, site, mode):
    """A six-step web task: call by call against the site until the closing sentence, or the first wrong answer."""
    run = Run()
    clover.clear()
    for step in range(len(site.calls) + 1):
        example = tasks.web_example(site, step)
        text, stats = answer(clover, example, mode)
        run.add(stats, example.exact(text))
        if not run.exact:
            break
    return run


def held_out(task, count):
    """`count` held-out tasks, each a function of (clover, mode) that returns its Run."""
    if task == "web":
        sites = [web.WebSite(rng) for rng in tasks.held_out_rngs(task, count, SEED)]
        return [lambda clover, mode, site=site: web_loop(clover, site, mode) for site in sites]
    examples = tasks.held_out(task, count, SEED)
    return [lambda clover, mode, example=example: single(clover, example, mode) for example in examples]


def evaluate(clover, task, count):
    """The figures of one task kind; see scripts/eval."""
    runs = {"block": [], "ar": []}
    for i, each in enumerate(held_out(task, count)):
        for mode in ("block", "ar") if i % 2 == 0 else ("ar", "block"):
            runs[mode].append(each(clover, mode))

    def total(mode, name):
        return sum(getattr(run, name) for run in runs[mode])

    pairs = [(b, a) for b, a in zip(runs["block"], runs["ar"], strict=True) if b.answers == a.answers]
    return {
        "n": count,
        "block_exact": round(total("block", "exact") / count, 4),
        "ar_exact": round(total("ar", "exact") / count, 4),
        "tokens_per_step": round(total("block", "tokens") / max(1, total("block", "steps")), 3),
        "passes_per_task": round((total("block", "steps") + total("block", "commits")) / count, 2),
        "time_ratio": round(sum(a.seconds for _, a in pairs) / sum(b.seconds for b, _ in pairs), 3) if pairs else None,
    }


def main():
    """Command line of scripts/eval."""
    parser = argparse.ArgumentParser(prog="scripts/eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on standard output")
    parser.add_argument("--tasks", default=",".join(EVALUATED), help="comma-separated: " + ", ".join(tasks.TASKS))
    parser.add_argument("--n", type=int, default=300, help="tasks of each kind")
    parser.add_argument("--type", default="q8_0", help="type of the weights, as clover-convert --outtype")
    parser.add_argument("--checkpoint", type=pathlib.Path, default=CHECKPOINT)
    parser.add_argument("--threads", type=int, default=0, help="0: all cores")
    args = parser.parse_args()
    names = args.tasks.split(",")
    unknown = [name for name in names if name not in tasks.TASKS]
    if unknown or args.n < 1:
        parser.error(f"unknown task: {unknown[0]}" if unknown else "--n must be at least 1")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "model.gguf"
        convert(args.checkpoint, path, type=args.type)
        result = {}
        with Clover(path, n_threads=args.threads) as clover:
            for name in names:
                result[name] = evaluate(clover, name, args.n)
                if not args.json:
                    print(name.ljust(8), "  ".join(f"{key} {value}" for key, value in result[name].items()), flush=True)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    try:
        main()
    except CloverError as error:
        sys.exit(f"scripts/eval: error: {error}")
