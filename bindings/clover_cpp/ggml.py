"""libggml's tensor types, and its own quantisers: float32 rows to the bytes of a type, and back."""

import ctypes as c
import dataclasses
import functools
import sys

import numpy as np

from . import native
from .errors import ArgumentError, ResourceError

NAMES = {"darwin": "libggml-base.dylib", "win32": "ggml-base.dll"}

# The types that rows can be written in: name in lower case, and number in GGUF files (ggml.h, enum ggml_type).
NUMBERS = {
    "f32": 0, "f16": 1, "bf16": 30,
    "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8,
    "q2_k": 10, "q3_k": 11, "q4_k": 12, "q5_k": 13, "q6_k": 14,
    "iq1_s": 19, "iq1_m": 29, "iq2_xxs": 16, "iq2_xs": 17, "iq2_s": 22, "iq3_xxs": 18, "iq3_s": 21, "iq4_nl": 20, "iq4_xs": 23,
    "mxfp4": 39,
}  # fmt: skip

# The largest magnitude that a type surely holds; where nothing is said, the largest float16, since blocks are scaled by one.
FLOAT16_MAX = 65504.0
LARGEST = {"f32": 3.4028234663852886e38, "bf16": 3.3895313892515355e38, "q8_0": 127 * FLOAT16_MAX}

_INT64 = c.c_int64

FUNCTIONS = {  # name: (result, arguments), as in ggml.h
    "ggml_type_name": (c.c_char_p, [c.c_int]),
    "ggml_blck_size": (_INT64, [c.c_int]),
    "ggml_type_size": (c.c_size_t, [c.c_int]),
    "ggml_quantize_requires_imatrix": (c.c_bool, [c.c_int]),
    "ggml_quantize_chunk": (c.c_size_t, [c.c_int, c.c_void_p, c.c_void_p, _INT64, _INT64, _INT64, c.c_void_p]),
    "ggml_get_type_traits": (c.c_void_p, [c.c_int]),
}


class _Traits(c.Structure):
    """struct ggml_type_traits."""

    _fields_ = [
        ("type_name", c.c_char_p),
        ("blck_size", _INT64),
        ("blck_size_interleave", _INT64),
        ("type_size", c.c_size_t),
        ("is_quantized", c.c_bool),
        ("to_float", c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, _INT64)),
        ("from_float_ref", c.c_void_p),
    ]


@dataclasses.dataclass(frozen=True)
class Type:
    """A tensor type: its name in lower case, ggml's number, elements and bytes of a block."""

    name: str
    number: int
    block: int
    block_bytes: int
    needs_importance: bool

    @property
    def largest(self):
        """The largest magnitude that the type surely holds."""
        return LARGEST.get(self.name, FLOAT16_MAX)

    def row_bytes(self, n):
        """Bytes of a row of n elements, n a multiple of `block`."""
        return n // self.block * self.block_bytes


@functools.cache
def library():
    """libggml-base as a `ctypes.CDLL` with argument types set. Raises ResourceError if it is missing or does not fit."""
    native.library()  # the same process must not load two builds
    path = native.library_path().with_name(NAMES.get(sys.platform, "libggml-base.so"))
    try:
        lib = c.CDLL(str(path))
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ResourceError(f"{path} cannot be used: {error}") from error
    return lib


@functools.cache
def types():
    """The writable types by name, with the sizes that the library gives them."""
    lib = library()
    found = {}
    for name, number in NUMBERS.items():
        stated = (lib.ggml_type_name(number) or b"").decode().lower()
        if stated != name:
            raise ResourceError(f"type {number} of this libggml is {stated!r}, not {name!r}: the library does not fit")
        sizes = lib.ggml_blck_size(number), lib.ggml_type_size(number)
        found[name] = Type(name, number, *sizes, needs_importance=lib.ggml_quantize_requires_imatrix(number))
    return found


def quantize(kind, rows, importance=None):
    """Rows to the bytes of a type, bit for bit as llama-quantize writes them. May run on several threads at once.

    kind: a `Type`. rows: float32 [n, k], k a multiple of `kind.block`, finite, magnitudes at most `kind.largest`: the caller has
    checked, libggml aborts on some such values. importance: float32 [k], weight of each column, or None.
    Returns uint8 [n, kind.row_bytes(k)]. Raises ArgumentError for shapes that do not fit, or missing importance.
    """
    rows = np.ascontiguousarray(rows, np.float32)
    n, k = rows.shape
    if k % kind.block:
        raise ArgumentError(f"rows of {k} do not divide into the blocks of {kind.block} of type {kind.name}")
    if kind.needs_importance and importance is None:
        raise ArgumentError(f"type {kind.name} needs an importance matrix")
    if importance is not None:
        importance = np.ascontiguousarray(importance, np.float32)
        if importance.shape != (k,):
            raise ArgumentError(f"importance of shape {list(importance.shape)} does not fit rows of {k}")
    out = np.empty((n, kind.row_bytes(k)), np.uint8)
    if out.size:
        weights = None if importance is None else importance.ctypes.data
        library().ggml_quantize_chunk(kind.number, rows.ctypes.data, out.ctypes.data, 0, n, k, weights)
    return out


def dequantize(kind, raw, k):
    """Bytes of a type to rows: uint8 [n, kind.row_bytes(k)] to float32 [n, k]."""
    raw = np.ascontiguousarray(raw, np.uint8).reshape(-1, kind.row_bytes(k))
    if kind.name == "f32":
        return raw.view("<f4")
    rows = np.empty((len(raw), k), np.float32)
    if rows.size:
        traits = _Traits.from_address(library().ggml_get_type_traits(kind.number))
        traits.to_float(raw.ctypes.data, rows.ctypes.data, rows.size)
    return rows
