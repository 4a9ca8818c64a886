"""Reading a written model back and comparing every tensor with its source."""

import concurrent.futures
import dataclasses
import os

import numpy as np

from clover_convert.chunks import chunks, values
from clover_convert.pipeline import in_order
from clover_cpp import ggml
from clover_cpp.errors import ModelFileError

# type -> (relative bound, largest multiple of a block's float16 scale).
# The bound is for the root mean square error of a block relative to its largest magnitude; with importance, the mean is weighted by
# it. It is about 1.4 times the worst that was measured on normal, uniform, heavy-tailed, constant and two-valued weights, without
# importance and with one of any spread. Rows in a wrong order have about 0.47 (normal weights, blocks of 256).
# The multiple says what a scale loses where it is a denormal number (1 where values themselves may be).
BOUNDS = {
    "f32": (0, 0), "f16": (2**-11, 1), "bf16": (2**-8, 1), "q8_0": (0.006, 128),
    "q6_k": (0.015, 128 * 32), "q5_k": (0.03, 63 * 32), "q5_1": (0.045, 32), "q5_0": (0.08, 16), "q4_k": (0.05, 63 * 16),
    "iq4_nl": (0.09, 128), "iq4_xs": (0.09, 32 * 128), "q4_1": (0.09, 16), "q4_0": (0.16, 8), "mxfp4": (0.3, 1),
    "q3_k": (0.2, 32 * 4), "iq3_s": (0.4, 31 * 16), "iq3_xxs": (0.4, 31 * 16),
    "q2_k": (0.22, 15 * 4), "iq2_s": (0.28, 4 * 43), "iq2_xs": (0.25, 4 * 43), "iq2_xxs": (0.4, 4 * 43),
    "iq1_s": (0.45, 20), "iq1_m": (0.45, 20),
}  # fmt: skip
DENORMAL = 2.0**-25  # half a step of the smallest float16 numbers


@dataclasses.dataclass(frozen=True)
class Worst:
    """The tensor that is closest to its bound: `ratio` is its largest error over the bound of its type."""

    name: str = ""
    ratio: float = 0.0


def verify_files(paths, shards, targets, config, threads, allow_non_finite=False, progress=None):
    """The `Worst` tensor of a model written to `paths`. Raises ModelFileError, with the tensor's name, where something is wrong."""
    targets = iter(targets)
    worst, done, total = Worst(), 0, sum(entry.size for shard in shards for entry in shard.entries)
    with concurrent.futures.ThreadPoolExecutor(threads, "verify") as pool:
        for path, shard in zip(paths, shards, strict=True):
            try:
                with open(path, "rb") as file:
                    _check_frame(path, file, shard)
                    offset = len(shard.header)
                    for entry in shard.entries:
                        worst_here = 0.0
                        for size, ratio in _ratios(pool, threads, file, offset, next(targets), config, allow_non_finite):
                            worst_here = max(worst_here, ratio)
                            if ratio > 1:
                                pool.shutdown(wait=True, cancel_futures=True)
                                raise ModelFileError(f"{path}: tensor {entry.name!r} differs from its source")
                            done += size
                            if progress:
                                progress(done, total)
                        if worst_here >= worst.ratio:
                            worst = Worst(entry.name, worst_here)
                        offset += entry.padded
            except OSError as error:
                raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error
    return worst


def _check_frame(path, file, shard):
    size = os.fstat(file.fileno()).st_size
    if size != shard.size:
        raise ModelFileError(f"{path} has {size} bytes, not {shard.size}")
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # from the disk, not from memory
    if file.read(len(shard.header)) != shard.header:
        raise ModelFileError(f"{path}: the header differs from what this checkpoint and these options give")


def _ratios(pool, threads, file, offset, target, config, allow_non_finite):
    def calls():
        at = offset
        for chunk in chunks(target):
            yield _ratio, file.fileno(), at, chunk, config, allow_non_finite
            at += chunk.size

    return in_order(pool, threads, calls())


def _ratio(descriptor, offset, chunk, config, allow_non_finite):
    """(bytes of the chunk, largest error of its blocks over the type's bound)."""
    kind = chunk.target.kind
    wanted, _ = values(chunk, config, allow_non_finite)
    raw = np.frombuffer(os.pread(descriptor, chunk.size, offset), np.uint8)
    found = ggml.dequantize(kind, raw, wanted.shape[1])
    if kind.block == 1:
        same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
        wanted, found = np.where(same, 0, wanted), np.where(same, 0, found)
    wanted, found = wanted.reshape(len(wanted), -1, kind.block), found.reshape(len(wanted), -1, kind.block)
    weights = np.ones(wanted.shape[1:]) if chunk.importance is None else chunk.importance.reshape(wanted.shape[1:])
    weights = weights / np.maximum(weights.sum(axis=1, dtype=np.float64), np.finfo(np.float32).tiny)[:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.sqrt((np.square(found - wanted, dtype=np.float64) * weights).sum(axis=2))
        relative, multiple = BOUNDS[kind.name]
        allowed = relative * np.abs(wanted).max(axis=2) + multiple * DENORMAL
        ratio = np.divide(error, allowed, out=np.where(error > 0, np.inf, 0.0), where=allowed > 0)
    ratio[np.isnan(ratio)] = np.inf
    return chunk.size, float(ratio.max(initial=0.0))
