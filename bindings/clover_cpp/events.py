"""What a generation reports: text, steps, and counts."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Text:
    """The next piece of the answer: final, whole characters."""

    text: str


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step fixed. `positions` count from the block's first, which is position `start` of the answer.

    Step 0 is the position that the last causal pass predicts; step s >= 1 is the block's s-th denoising pass. `confidences`
    are probabilities before the temperature.
    """

    block: int
    step: int
    start: int
    block_size: int
    positions: tuple
    tokens: tuple
    confidences: tuple


@dataclasses.dataclass(frozen=True)
class Stats:
    """Of one answer: counts, and wall seconds.

    `finish`: "stop" (the model ended it), "stop_string", "length", "cancelled", or None while it is in the making.
    `tokens` are those delivered: without the end token, and those of which a stop string left no text. `tokens_per_step` is
    tokens / block_passes; autoregressive: tokens / tokens chosen, so at most 1.
    """

    finish: str | None
    prompt_tokens: int
    tokens: int
    prompt_passes: int
    block_passes: int
    commit_passes: int
    causal_passes: int
    prompt_seconds: float
    block_seconds: float
    commit_seconds: float
    causal_seconds: float
    seconds: float
    tokens_per_step: float


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """Facts of a model file. Without a block pass `block_size` is 0; a token that is not there is -1."""

    n_vocab: int
    n_ctx_train: int
    can_block: bool
    block_size: int
    threshold: float
    shift_logits: bool
    mask_token: int
    eos_token: int
    n_params: int
    n_bytes: int


def from_struct(kind, struct, **changed):
    """A dataclass of this module from the ctypes struct with the same field names."""
    names = [field.name for field in dataclasses.fields(kind)]
    return kind(**{**{name: getattr(struct, name) for name in names}, **changed})
