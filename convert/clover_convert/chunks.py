"""From a planned tensor to the bytes of its type, one chunk of rows after the other. All here may run on many threads at once."""

import dataclasses
import math

import numpy as np

from clover_cpp import ggml
from clover_cpp.errors import CheckpointError

CHUNK = 1 << 20  # elements


@dataclasses.dataclass(frozen=True)
class Target:
    """A tensor to write (`tensors.Output`), the `ggml.Type` it is written in, and the importance of its columns.

    importance: float32 [matrices, columns], a row for each matrix of the tensor, or None.
    """

    tensor: object
    kind: ggml.Type
    importance: np.ndarray | None = None

    @property
    def size(self):
        """Bytes of the whole tensor."""
        return self.kind.row_bytes(math.prod(self.tensor.shape))


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a target, all of one matrix where there is importance: spans are (source tensor, first row, end row)."""

    target: Target
    spans: list
    size: int
    importance: np.ndarray | None = None


def chunks(target):
    """The chunks of a target, in the order in which they are written."""
    tensor = target.tensor
    length = tensor.pieces[0][0].row_length
    most = max(1, CHUNK // length)
    matrix = math.prod(tensor.shape[:-1]) // len(target.importance) if target.importance is not None else None
    row, spans = 0, []

    def close():
        count = sum(end - first for _, first, end in spans)
        importance = None if matrix is None else target.importance[(row - 1) // matrix]
        return Chunk(target, spans, target.kind.row_bytes(count * length), importance)

    for source, first, end in tensor.pieces:
        while first < end:
            room = most - sum(b - a for _, a, b in spans)
            if matrix:
                room = min(room, matrix - row % matrix)
            step = min(end - first, room)
            spans.append((source, first, first + step))
            first, row = first + step, row + step
            if step == room:
                yield close()
                spans = []
    if spans:
        yield close()


@dataclasses.dataclass
class Odd:
    """How many values of a tensor are not finite."""

    nan: int = 0
    infinite: int = 0

    def __str__(self):
        return f"{self.nan} NaN, {self.infinite} infinite"


def values(chunk, config, allow_non_finite=False):
    """(float32 rows of a chunk as they are to be stored, `Odd` by name of the source tensor).

    Raises CheckpointError for values that the target's type does not hold, and for ones that are not finite unless they are
    allowed; those are 0 in the types that store blocks.
    """
    odd, parts = {}, []
    for source, first, end in chunk.spans:
        part = source.rows(first, end)
        if not _within(part, np.finfo(np.float32).max):
            if not allow_non_finite:
                found = _count(source.rows(a, b) for a, b in _steps(source))
                raise CheckpointError(f"tensor {source.name!r} has values that are not finite: {found}")
            seen, found = odd.setdefault(source.name, Odd()), _count([part])
            seen.nan, seen.infinite = seen.nan + found.nan, seen.infinite + found.infinite
        parts.append(part)
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    tensor, kind, source = chunk.target.tensor, chunk.target.kind, chunk.spans[0][0]
    if tensor.values:
        with np.errstate(over="ignore", invalid="ignore"):
            rows = tensor.values(rows, config)
        if not odd and not _within(rows, np.finfo(np.float32).max):
            raise CheckpointError(f"tensor {source.name!r} has values too large for {tensor.name}")
    if odd and kind.block > 1:
        rows = np.where(np.isfinite(rows), rows, np.float32(0))
    if not _within(rows, kind.largest):
        size = np.abs(rows, where=np.isfinite(rows), out=np.zeros_like(rows))
        if size.max() > kind.largest:
            name = _source_of(chunk, int(size.argmax()) // rows.shape[1]).name
            raise CheckpointError(
                f"tensor {name!r}: a value is too large, {size.max():g} is above {kind.largest:g}, the largest of {kind.name}:"
                f" use --outtype {'f32' if kind.name == 'bf16' else 'bf16 or f32'}"
            )
    return rows, odd


def _source_of(chunk, row):
    for source, first, end in chunk.spans:
        row -= end - first
        if row < 0:
            return source
    raise IndexError(row)


def encode(chunk, config, allow_non_finite=False):
    """(bytes of a chunk as uint8 array, `Odd` by name of the source tensor); errors as for `values`."""
    rows, odd = values(chunk, config, allow_non_finite)
    return ggml.quantize(chunk.target.kind, rows, chunk.importance).reshape(-1), odd


def _within(rows, largest):
    return not rows.size or (rows.min() >= -largest and rows.max() <= largest)  # false for NaN too


def _steps(source):
    """Ranges of rows that cover a source tensor."""
    count = math.prod(source.shape) // source.row_length
    step = max(1, CHUNK // source.row_length)
    return [(first, min(first + step, count)) for first in range(0, count, step)]


def _count(parts):
    odd = Odd()
    for part in parts:
        odd.nan += int(np.isnan(part).sum())
        odd.infinite += int(np.isinf(part).sum())
    return odd
