"""A strict reader of safetensors files: every invariant of the header is checked before a tensor is read.

The format (github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON header, then the tensors' bytes
without holes or overlaps. Tensors are read by rows, so memory use does not depend on their size.
"""

import dataclasses
import hashlib
import json
import math
import os
import reprlib
import stat

import numpy as np

from clover_cpp.errors import CheckpointError

MAX_HEADER = 100_000_000
MAX_NAME = 1000  # characters
MAX_DIMENSIONS = 8
MAX_READ = 1 << 30  # bytes of one system call

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

FP8 = "F8_E4M3"
READABLE = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), FP8: np.dtype("u1")}


def e4m3_values():
    """The values of all E4M3 codes: float32 [256]. 4 bits of exponent, bias 7; no infinities; 0x7f and 0xff are NaN."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    values = np.where(exponent > 0, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9)).astype(np.float32)
    values[-1] = np.nan
    return np.concatenate([values, -values])


E4M3 = e4m3_values()


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a file: its name, dtype (as the header spells it), shape and absolute byte offset."""

    file: "SafetensorsFile"
    name: str
    dtype: str
    shape: tuple
    offset: int

    @property
    def row_length(self):
        """Elements in a row: the last dimension; a vector counts as a column."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    def rows(self, start, stop):
        """Rows `start` to `stop` of the tensor seen as a matrix: float32 [stop - start, row_length]; E4M3 without its scales."""
        kind = READABLE[self.dtype]
        raw = np.empty((stop - start, self.row_length), kind)
        self.file.read_into(self.offset + start * self.row_length * kind.itemsize, raw)
        if self.dtype == FP8:
            return np.take(E4M3, raw, mode="clip")
        if self.dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32, copy=False)


class SafetensorsFile:
    """An open safetensors file; `tensors` maps names to :class:`Tensor`. Raises CheckpointError when it is not one."""

    def __init__(self, path):
        self.path = path
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                raise CheckpointError(f"{path}: not a regular file")
            self._file = open(path, "rb")  # noqa: SIM115
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self):
        """Close the file; its tensors cannot be read any more."""
        self._file.close()

    def fingerprint(self):
        """A text that changes when the header, the size or the time of the last change does."""
        found = os.fstat(self._file.fileno())
        return f"{self.digest} {found.st_size} {found.st_mtime_ns}"

    def read_into(self, offset, array):
        """Fill an array with the bytes at an absolute offset; several threads may read at once."""
        view = memoryview(array.reshape(-1)).cast("B") if array.size else b""
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._file.fileno(), [view[done : done + MAX_READ]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {error.strerror}") from error
            if not count:
                raise self._error("the file ended while it was read")
            done += count

    def _error(self, what):
        return CheckpointError(f"{self.path}: {what}")

    def _read_header(self):
        size = os.fstat(self._file.fileno()).st_size
        first = self._file.read(8)
        length = int.from_bytes(first, "little")
        if first == b"version ":
            raise self._error("a Git LFS pointer instead of the file: fetch it with `git lfs pull`")
        if size >= 8 and length > MAX_HEADER:
            raise self._error(f"not a safetensors file: {length} bytes of header, and the format allows {MAX_HEADER}")
        if size < 8 or length > size - 8:
            raise self._error("truncated inside the header")
        try:
            raw = self._file.read(length)
            header = json.loads(raw.decode("utf-8"), object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as error:
            raise self._error(f"the header is not valid JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._error("the header is not a JSON object")
        header.pop("__metadata__", None)
        self.digest = hashlib.sha256(raw).hexdigest()
        start = 8 + length
        spans = {name: self._span(name, entry) for name, entry in header.items()}
        end = 0
        for name in sorted(spans, key=lambda name: spans[name][2:]):
            begin = spans[name][2]
            if begin != end:
                fault = f"a hole of {begin - end} bytes" if begin > end else f"an overlap of {end - begin} bytes"
                raise self._error(f"tensor {name!r} begins at byte {begin} of the data, not at {end}: {fault}")
            end = spans[name][3]
        if start + end > size:
            raise self._error(f"truncated: {size} bytes, but the header describes {start + end}")
        if start + end < size:
            raise self._error(f"{size - start - end} bytes follow the last tensor")
        return {name: Tensor(self, name, dtype, shape, start + begin) for name, (dtype, shape, begin, _) in spans.items()}

    def _unique(self, pairs):
        result = {}
        for name, value in pairs:
            if name in result:
                raise self._error(f"{name[:MAX_NAME]!r} occurs twice in the header")
            result[name] = value
        return result

    def _span(self, name, entry):
        if len(name) > MAX_NAME:
            raise self._error(f"a tensor's name has {len(name)} characters; at most {MAX_NAME} are read")
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise self._error(f"tensor {name!r}: malformed header entry") from error
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise self._error(f"tensor {name!r}: unknown dtype {reprlib.repr(dtype)}")
        if len(shape) > MAX_DIMENSIONS:
            raise self._error(f"tensor {name!r} has {len(shape)} dimensions; at most {MAX_DIMENSIONS} are read")
        if any(type(n) is not int or not 0 <= n < 1 << 63 for n in (*shape, begin, end)):
            raise self._error(f"tensor {name!r}: shape and offsets must be whole numbers from 0 to 2^63 - 1")
        if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
            raise self._error(f"tensor {name!r}: {end - begin} bytes do not hold a {dtype} tensor of shape {list(shape)}")
        return dtype, shape, begin, end
