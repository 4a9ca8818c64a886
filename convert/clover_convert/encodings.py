"""The types a GGUF tensor can be written in: float32 rows to bytes.

Formats as in ggml (ggml-quants.c, `quantize_row_q8_0_ref`; ggml-impl.h, `ggml_compute_fp32_to_bf16`); results are bit-equal.
"""

import dataclasses
from collections.abc import Callable

import numpy as np


class EncodingError(ValueError):
    """A value does not fit into the type."""


def encode_f32(rows):
    """float32 [n, k] to little-endian float32."""
    return rows.astype("<f4", copy=False)


def encode_f16(rows):
    """float32 [n, k] to float16, rounded to nearest even; EncodingError where that would be infinite."""
    with np.errstate(over="ignore"):
        half = rows.astype("<f2")
    if np.isinf(half).any():
        raise EncodingError(f"the value {np.abs(rows).max():g} is above 65504, the largest of float16: use --type bf16 or f32")
    return half


def encode_bf16(rows):
    """float32 [n, k] to bfloat16, rounded to nearest even; EncodingError where that would be infinite."""
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    short = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    if ((short & 0x7FFF) == 0x7F80).any():
        raise EncodingError(f"the value {np.abs(rows).max():g} is above the largest of bfloat16: use --type f32")
    return short


Q8_BLOCK = np.dtype([("d", "<f2"), ("q", "i1", (32,))])


def encode_q8_0(rows):
    """float32 [n, k], k a multiple of 32, to blocks of a float16 scale and 32 signed bytes."""
    x = np.ascontiguousarray(rows, np.float32).reshape(-1, 32)
    scale = np.abs(x).max(axis=1) / np.float32(127)
    blocks = np.empty(len(x), Q8_BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):  # the inverse of a denormal scale is infinite; the stored scale is 0 then
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
        x = x * inverse[:, None]
        size = np.abs(x)
        whole = np.floor(size)
        whole += size - whole >= 0.5  # half away from zero; adding 0.5 first would round 0.49999997 up
        blocks["d"] = scale
        blocks["q"] = np.copysign(whole, x)
    if np.isinf(blocks["d"]).any():
        raise EncodingError("a value is too large for the float16 scale of q8_0: use --type bf16 or f32")
    return blocks


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How one type is stored: ggml's type number, llama.cpp's file type, elements and bytes of a block, the encoder."""

    ggml_type: int
    file_type: int
    block: int
    block_bytes: int
    encode: Callable


ENCODINGS = {
    "f32": Encoding(0, 0, 1, 4, encode_f32),
    "f16": Encoding(1, 1, 1, 2, encode_f16),
    "bf16": Encoding(30, 32, 1, 2, encode_bf16),
    "q8_0": Encoding(8, 7, 32, 34, encode_q8_0),
}
