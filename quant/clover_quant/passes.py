"""The passes that importance matrices and quality reports run over a text: causal ones, and blocks with masked positions."""

import dataclasses
import itertools
import pathlib
import random

from clover_cpp.errors import ArgumentError, UnsupportedError

RATIOS = (1.0, 0.75, 0.5, 0.25)  # from the first pass over a block to one of the last
STEP = 32  # tokens of a causal pass of a model without blocks


@dataclasses.dataclass(frozen=True)
class Pass:
    """One pass: `kind` "causal" (its tokens stay in the context) or "block"; `masked`: positions that hold the mask token."""

    kind: str
    tokens: tuple
    masked: tuple = ()


def chunks(clover, path, size, count=None):
    """The text of a file as lists of `size` tokens, at most `count`; what is left over at the end is not used.

    Control tokens written in the text are those tokens. Raises ArgumentError for a file that cannot be read or is too short.
    """
    try:
        text = pathlib.Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path}: not UTF-8 text (byte {error.start})") from error
    if size > clover.n_ctx:
        raise ArgumentError(f"a context of {size} tokens is longer than the model's, {clover.n_ctx}")
    tokens = clover.tokenize(text)
    full = len(tokens) // size
    if not full:
        raise ArgumentError(f"{path}: {len(tokens)} tokens are too few for one context of {size}: give more text or less context")
    return [tokens[i * size : (i + 1) * size] for i in range(full if count is None else min(full, count))]


class Walk:
    """The passes over chunks of text, block by block. The same arguments give the same passes.

    info: the model's `ModelInfo`. mode: "both", "causal" or "block". ratios: each block pass masks this part of its positions, at
    least one, drawn by `seed`; the ratios take turns from block to block.
    Raises UnsupportedError where the model has no block pass, ArgumentError for ratios out of range.
    """

    def __init__(self, info, mode="both", ratios=RATIOS, seed=0):
        if mode != "causal" and not info.can_block:
            raise UnsupportedError("this model has no block pass: only causal passes can be run")
        if not ratios or not all(0 < ratio <= 1 for ratio in ratios):
            raise ArgumentError(f"mask ratios must be above 0, up to 1: {', '.join(map(str, ratios)) or 'none given'}")
        self._mask, self._step, self._blocks = info.mask_token, info.block_size or STEP, mode != "causal"
        self._ratios, self._random = itertools.cycle(ratios), random.Random(seed)

    def __call__(self, chunk):
        """The passes over a chunk, from an empty context on: before each causal pass but the first, a block pass on its tokens."""
        for start in range(0, len(chunk), self._step):
            tokens = tuple(chunk[start : start + self._step])
            if start and self._blocks:
                yield self._masked(tokens)
            yield Pass("causal", tokens)

    def _masked(self, tokens):
        count = max(1, round(next(self._ratios) * len(tokens)))
        masked = tuple(sorted(self._random.sample(range(len(tokens)), count)))
        return Pass("block", tuple(self._mask if i in masked else token for i, token in enumerate(tokens)), masked)
