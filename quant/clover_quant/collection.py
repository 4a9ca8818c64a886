"""Importance matrices from a text, by causal passes and block passes over it."""

from clover_cpp import ArgumentError, Clover, Importance
from clover_quant.imatrix import Imatrix
from clover_quant.passes import RATIOS, Walk, chunks

MODES = ("both", "causal", "block")


def collect(model, text, context=512, count=None, mode="both", ratios=RATIOS, seed=0, threads=0, progress=None):
    """The `Imatrix` of a GGUF model over a text file.

    The text is cut into chunks of `context` tokens, `count` at most, each evaluated from an empty context on. mode "causal": as
    llama-imatrix does it; "block": blocks with masked positions (see `passes.Walk`) after the text before them, of which only the
    block passes count; "both": the causal passes too. Both kinds then see each matrix about equally often.
    progress: called with (chunks done, chunks in all). threads: 0 for all cores.
    Raises ArgumentError (also where no pass counts: a chunk of one block has no block pass), UnsupportedError, ModelFileError,
    EngineError (inputs that are not finite).
    """
    importance = Importance()
    with Clover(model, n_ctx=context, n_threads=threads, importance=importance) as clover:
        walk = Walk(clover.info, mode, ratios, seed)
        given = chunks(clover, text, context, count)
        for done, chunk in enumerate(given):
            if progress:
                progress(done, len(given))
            clover.clear()
            if mode == "causal":
                clover.evaluate(chunk)
                continue
            for each in walk(chunk):
                importance.paused = mode == "block" and each.kind == "causal"
                clover.evaluate(each.tokens, each.kind)
        if progress:
            progress(len(given), len(given))
    entries = importance.entries()
    if not entries:
        raise ArgumentError(f"a context of {context} tokens has no block passes: they need one before the block, give more")
    sums, counts = ({name: entry[i] for name, entry in entries.items()} for i in range(2))
    return Imatrix(None, sums, counts, [str(text)], len(given))
