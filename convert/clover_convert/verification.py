"""Reading a written model back and comparing every tensor with its source."""

import collections
import concurrent.futures
import dataclasses
import os

import numpy as np

from clover_convert.chunks import chunks, values
from clover_cpp import ggml
from clover_cpp.errors import ModelFileError

# The largest root mean square error of a block that counts as right, relative to the block's largest magnitude. Sound files stay
# below about half of it, with and without importance; a wrong order of rows or a damaged scale is far above.
BOUNDS = {
    "f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.006, "q6_k": 0.025, "q5_k": 0.05, "q5_0": 0.05, "q5_1": 0.05, "q4_k": 0.1,
    "q4_0": 0.1, "q4_1": 0.1, "iq4_nl": 0.1, "iq4_xs": 0.1, "mxfp4": 0.15, "q3_k": 0.2, "iq3_s": 0.2, "iq3_xxs": 0.25,
    "q2_k": 0.3, "iq2_s": 0.3, "iq2_xs": 0.3, "iq2_xxs": 0.35, "iq1_s": 0.4, "iq1_m": 0.4,
}  # fmt: skip
TINY = 1e-6  # magnitudes below are as good as zero: block scales are float16


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
    pending = collections.deque()
    for chunk in chunks(target):
        pending.append(pool.submit(_ratio, file.fileno(), offset, chunk, config, allow_non_finite))
        offset += chunk.size
        if len(pending) > 2 * threads:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _ratio(descriptor, offset, chunk, config, allow_non_finite):
    """(bytes of the chunk, largest error of its blocks over the type's bound)."""
    kind = chunk.target.kind
    wanted, _ = values(chunk, config, allow_non_finite)
    raw = np.frombuffer(os.pread(descriptor, chunk.size, offset), np.uint8)
    found = ggml.dequantize(kind, raw, wanted.shape[1])
    if kind.block == 1:
        same = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
        wanted, found = np.where(same, 0, wanted).reshape(-1, 1), np.where(same, 0, found).reshape(-1, 1)
    wanted, found = wanted.reshape(-1, max(kind.block, 1)), found.reshape(-1, max(kind.block, 1))
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.sqrt(np.square(found - wanted, dtype=np.float64).mean(axis=1))
        allowed = BOUNDS[kind.name] * np.abs(wanted).max(axis=1) + (TINY if kind.name != "f32" else 0)
        ratio = np.divide(error, allowed, out=np.where(error > 0, np.inf, 0.0), where=allowed > 0)
    ratio[np.isnan(ratio)] = np.inf
    return chunk.size, float(ratio.max(initial=0.0))
