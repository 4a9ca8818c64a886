"""Quality report: quantised models against the one they were made from, on the same text, masks and tasks."""

import dataclasses
import json
import pathlib
import statistics
import time

from clover_cpp import Clover
from clover_cpp.errors import ArgumentError, CloverError, ModelFileError
from clover_quant import shards
from clover_quant.comparison import Rows, compare
from clover_quant.passes import RATIOS, Walk, chunks

TASK_TOKENS = 512  # most of an answer
TIMED = 15  # passes of each kind
TIMED_CONTEXT = 256  # most tokens before them


@dataclasses.dataclass(frozen=True)
class Settings:
    """How it is measured. `context`: tokens of a chunk of the text; `count`: most chunks, None for all; `ratios`: masked parts of
    blocks, in turn; `threshold`: confidence above which a position is fixed, None for the base's; `threads`: 0 for all cores."""

    context: int = 512
    count: int | None = None
    ratios: tuple = RATIOS
    threshold: float | None = None
    seed: int = 0
    threads: int = 0


def report(base, models, text, tasks=None, settings=None, progress=None):
    """The report on GGUF files `models` against the file `base`, as a dictionary that JSON can hold.

    text: a file; tasks: a file of JSON lines, see `read_tasks`. progress: called with (models done, models in all).
    "models" has one entry per file, the base's own first:

    * "bytes" of the file, or of all files of a split model, "bits_per_weight" of its tensors;
    * "causal" and "block": over the positions that causal passes predict, and over those that are masked in block passes and
      predicted by them: KL divergence from the base's distribution in nats ("kld_mean", "kld_99.9": the 99.9 % quantile), "top1":
      share of positions with the base's first choice. None for the base;
    * "flips": {"full", "partial"}: the commit-flip rate of block passes with all, or some, of their positions masked: a position
      is fixed where the model's first choice has a probability above the threshold; "rate" is the share of those "fixed" that it
      fixes to another token than the base's first choice ("flipped"): no later pass takes it back. None where none was fixed;
    * "tasks": "exact" (share), "tokens_per_step" (tokens delivered per denoising pass), of greedy block decoding at the threshold;
      autoregressive for a model without blocks. None without tasks;
    * "pass_time": median time of a causal pass of one token and of a block pass over one block as ratios to the base's, both
      measured in turn on this machine. None for the base.

    Two models are open at a time. Raises ArgumentError, ModelFileError (named), EngineError.
    """
    settings = settings or Settings()
    given = read_tasks(tasks) if tasks else None
    paths = [pathlib.Path(path) for path in (base, *models)]
    entries = []
    with _open(paths[0], settings) as first:
        threshold = first.info.threshold if settings.threshold is None else settings.threshold
        if not 0 <= threshold <= 1:
            raise ArgumentError(f"threshold {threshold} is out of range: 0 to 1")
        _check_tasks(first, given or (), tasks)
        texts = chunks(first, text, settings.context, settings.count)
        for done, path in enumerate(paths):
            if progress:
                progress(done, len(paths))
            if done == 0:
                entries.append(_entry(path, first, given, threshold, None))
                continue
            with _open(path, settings) as other:
                _check_same(path, first, other, texts[0])
                try:
                    measured = _measure(first, other, texts, settings, threshold)
                    entries.append(_entry(path, other, given, threshold, measured))
                except CloverError as error:
                    raise type(error)(f"{path}: {error}") from error
        if progress:
            progress(len(paths), len(paths))
    fields = {**dataclasses.asdict(settings), "threshold": threshold}
    return {"base": paths[0].name, "text": pathlib.Path(text).name, "settings": fields, "models": entries}


def read_tasks(path):
    """Tasks of a file of JSON lines: {"messages": [...], "tools": [...] or null, "thinking": bool, "expected": "text"}.

    The last three but "expected" may be missing. Raises ArgumentError naming the line that is none.
    """
    try:
        lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path}: not UTF-8 text") from error
    tasks = []
    for number, line in enumerate(lines, 1):
        try:
            task = json.loads(line)
            fits = isinstance(task["messages"], list) and isinstance(task["expected"], str)
        except (ValueError, RecursionError, KeyError, TypeError):
            fits = False
        if not fits:
            raise ArgumentError(f'{path}: line {number} is no task: a JSON object with "messages" (a list) and "expected" (a text)')
        tasks.append(task)
    if not tasks:
        raise ArgumentError(f"{path}: no tasks")
    return tasks


def _check_tasks(clover, given, path):
    for number, task in enumerate(given, 1):
        try:
            clover.render(task["messages"], **_template_options(task))
        except CloverError as error:
            raise type(error)(f"{path}: line {number}: {error}") from error


def _open(path, settings):
    try:
        return Clover(path, n_ctx=0 if settings.context > 4096 else 4096, n_threads=settings.threads)
    except ModelFileError as error:
        raise error if str(path) in str(error) else ModelFileError(f"{path}: {error}") from error


def _check_same(path, base, other, tokens):
    for name in ("n_vocab", "can_block", "block_size", "mask_token", "shift_logits", "n_params"):
        ours, theirs = getattr(other.info, name), getattr(base.info, name)
        if ours != theirs:
            raise ArgumentError(f"{path}: {name} is {ours}, the base's is {theirs}: not the same model")
    if other.detokenize(tokens, special=True) != base.detokenize(tokens, special=True):
        raise ArgumentError(f"{path}: its vocabulary is not the base's")


def _entry(path, clover, tasks, threshold, measured):
    info = clover.info
    n_bytes = sum(file.stat().st_size for file in shards.paths(path))
    size = {"file": path.name, "bytes": n_bytes, "bits_per_weight": 8 * info.n_bytes / info.n_params}
    done = run_tasks(clover, tasks, threshold) if tasks else None
    return {**size, **(measured or {"causal": None, "block": None, "flips": None, "pass_time": None}), "tasks": done}


def _measure(base, other, texts, settings, threshold):
    info = base.info
    walk = Walk(info, "both" if info.can_block else "causal", settings.ratios, settings.seed)
    found = {"causal": [], "full": [], "partial": []}
    for chunk in texts:
        base.clear()
        other.clear()
        for each in walk(chunk):
            rows = compare(*(clover.logits(each.tokens, each.kind)[_predicting(info, each)] for clover in (base, other)),
                           threshold, info.mask_token)  # fmt: skip
            full = len(each.masked) == len(each.tokens)
            found["causal" if each.kind == "causal" else "full" if full else "partial"].append(rows)
    flips = {name: Rows.joined(found[name]).flips() for name in ("full", "partial")} if info.can_block else None
    return {
        "causal": Rows.joined(found["causal"]).summary(),
        "block": Rows.joined(found["full"] + found["partial"]).summary(),
        "flips": flips,
        "pass_time": pass_times(base, other, texts[0]),
    }


def _predicting(info, each):
    """Rows of a pass's logits that predict what is asked: all of a causal pass; those of the masked positions of a block."""
    if each.kind == "causal":
        return slice(None)
    shift = 1 if info.shift_logits else 0  # the causal pass before it predicts the first position
    return [i - shift for i in each.masked if i >= shift]


def run_tasks(clover, tasks, threshold):
    """Greedy answers to tasks, by blocks where the model has them: see `report`. What the model thinks first is not compared."""
    mode = "block" if clover.info.can_block else "ar"
    exact = tokens = passes = 0
    for task in tasks:
        clover.clear()
        answer = clover.generate(task["messages"], mode, TASK_TOKENS, threshold=threshold, **_template_options(task))
        exact += _said("".join(answer)) == _said(task["expected"])
        tokens += clover.stats.tokens
        passes += clover.stats.block_passes + clover.stats.causal_passes
    return {"count": len(tasks), "exact": exact / len(tasks), "tokens_per_step": tokens / passes if passes else None}


def _template_options(task):
    return {"tools": task.get("tools"), "enable_thinking": bool(task.get("thinking"))}


def _said(text):
    return text.split("</think>")[-1].strip()


def pass_times(base, other, tokens):
    """Median times of the other's passes over the base's: {"causal": of one token, "block": of one block, None without it}."""
    models, info = (base, other), base.info
    context = tokens[: min(TIMED_CONTEXT, max(1, len(tokens) - TIMED))]
    kinds = {"causal": tokens[-1:]}
    if info.can_block:
        kinds["block"] = [info.mask_token] * info.block_size
    times = {kind: ([], []) for kind in kinds}
    for clover in models:
        clover.clear()
        clover.evaluate(context)
    for turn in range(TIMED + 1):
        for kind, given in kinds.items():
            for i in (0, 1) if turn % 2 else (1, 0):
                begun = time.perf_counter()
                models[i].evaluate(given, kind)
                if turn:  # the first one warms up
                    times[kind][i].append(time.perf_counter() - begun)
    ratios = {kind: statistics.median(other) / statistics.median(base) for kind, (base, other) in times.items()}
    return {"causal": ratios["causal"], "block": ratios.get("block")}
