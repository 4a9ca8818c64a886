"""FP8 checkpoints: each tensor in E4M3 and the tensor of its scales become one, read as float32 like all others."""

import dataclasses
import math

import numpy as np

from clover_convert.folding import folded
from clover_convert.safetensors import FP8, Tensor
from clover_cpp.errors import CheckpointError

SUFFIXES = ("_scale_inv", "_scale")  # of the scales' names; both mean: value = E4M3 value * scale
SCALE_DTYPES = ("F32", "BF16", "F16")


@dataclasses.dataclass(frozen=True)
class ScaledTensor(Tensor):
    """An E4M3 tensor with its scales: float32 [matrices, block rows, block columns], for blocks of `block` (rows, columns)."""

    scales: np.ndarray
    block: tuple

    def rows(self, start, stop):
        """Rows as `Tensor.rows` gives them, times their scales: float32 [stop - start, row_length]."""
        values = super().rows(start, stop)
        matrix, row = np.divmod(np.arange(start, stop), _matrix(self.shape)[1])
        scales = self.scales[matrix, row // self.block[0]]
        width = self.block[1]
        count = values.shape[1] // width
        blocks = values[:, : count * width].reshape(len(values), count, width)
        with np.errstate(over="ignore"):  # the result is infinite, which is found like any other such value
            blocks *= scales[:, :count, None]
            values[:, count * width :] *= scales[:, count:]
        return values


def scaled(tensors, block):
    """The tensors by name, the E4M3 ones as `ScaledTensor`, without the scales.

    block: (rows, columns) that share a scale where a tensor has several. Reads the scales. Raises CheckpointError for E4M3
    tensors without scales, scales without such a tensor, scales of another shape, and values that are no scales.
    """
    result, scales, bare = {}, set(), []
    for name, tensor in tensors.items():
        if tensor.dtype == FP8:
            found = [name + suffix for suffix in SUFFIXES if name + suffix in tensors]
            if len(found) > 1:
                raise CheckpointError(f"tensor {name!r} has two scales: {' and '.join(found)}")
            if found:
                scales.add(found[0])
                tensor = _scaled(tensor, tensors[found[0]], block)
            else:
                bare.append(name)
        result[name] = tensor
    if bare:
        raise CheckpointError(f"{FP8} tensors without scales ({', '.join('NAME' + suffix for suffix in SUFFIXES)}): {folded(bare)}")
    result = {name: tensor for name, tensor in result.items() if name not in scales}
    orphans = [name for name in result if _is_scale(name, tensors)]
    if orphans:
        raise CheckpointError(f"scales without an {FP8} tensor of their name: {folded(orphans)}")
    return result


def _is_scale(name, tensors):
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)
    return suffix is not None and (name.removesuffix(suffix) in tensors or name.endswith(".weight" + suffix))


def _scaled(tensor, scale, block):
    if scale.dtype not in SCALE_DTYPES:
        raise CheckpointError(f"scale {scale.name!r} is {scale.dtype}, not {' or '.join(SCALE_DTYPES)}")
    matrices, rows, columns = _matrix(tensor.shape)
    grid = _grid(tensor, scale.shape)
    size = grid and (_block_size(rows, grid[1], block[0]), _block_size(columns, grid[2], block[1]))
    if not grid or grid[0] not in (1, matrices) or None in size:
        shapes = f"shape {list(scale.shape)}, which does not fit {list(tensor.shape)}"
        raise CheckpointError(f"scale {scale.name!r} has {shapes} in blocks of {block[0]} x {block[1]}")
    values = scale.rows(0, math.prod(scale.shape) // scale.row_length).reshape(grid)
    wrong = values[~((values > 0) & (values < np.inf))]
    if wrong.size:
        raise CheckpointError(f"scale {scale.name!r} has {wrong.size} values that are not finite and above 0, as {wrong[0]:g}")
    return ScaledTensor(**vars(tensor), scales=np.broadcast_to(values, (matrices, *grid[1:])), block=size)


def _matrix(shape):
    """(matrices, rows, columns) of a tensor; a vector is one column."""
    rows, columns = (*shape, 1)[:2] if len(shape) < 2 else shape[-2:]
    return math.prod(shape[:-2]), rows, columns


def _grid(tensor, shape):
    """Shape of scales as [matrices, block rows, block columns]: one for each dimension of the tensor or the first ones; or None."""
    if math.prod(shape) == 1:
        return (1, 1, 1)
    if len(shape) > max(len(tensor.shape), 2) or not 0 < math.prod(shape) <= math.prod(tensor.shape):
        return None
    shape = (*shape, *[1] * (len(tensor.shape) - len(shape)))
    return _matrix(shape)


def _block_size(length, count, block):
    """Length of the blocks of which `count` cover `length`; None if none does."""
    if count == 1:
        return length
    return {length: 1, -(-length // block): block}.get(count)
