"""Model files the engine's tests share: GGUF files converted from random tiny checkpoints, made once per test run."""

import functools
import pathlib
import tempfile

from checkpoints import tiny_clover, tiny_qwen
from clover_convert import convert

FOLDER = tempfile.TemporaryDirectory(prefix="clover-tests-")
SHARPEN = 6.0  # random logits times this: confidences on both sides of any threshold


@functools.cache
def clover(shift_logits=True, sharp=False, seed=1):
    """(GGUF file in F32, PyTorch reference) of a random Clover model; sharp: with confident predictions."""
    name = f"clover-{shift_logits}-{sharp}-{seed}"
    folder = pathlib.Path(FOLDER.name, name)
    model = tiny_clover(folder, seed=seed, shift_logits=shift_logits)
    if sharp:
        model.lm_head.weight.data *= SHARPEN
        model.save_pretrained(folder, dtype=model.lm_head.weight.dtype)
    return _converted(folder), model


@functools.cache
def qwen():
    """GGUF file in F32 of a random Qwen3.5-MoE model: no block pass."""
    folder = pathlib.Path(FOLDER.name, "qwen")
    tiny_qwen(folder)
    return _converted(folder)


def _converted(folder):
    output = folder.with_suffix(".gguf")
    convert(folder, output, type="f32")
    return output
