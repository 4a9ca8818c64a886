"""Reading an output back: its headers byte for byte, and every tensor against its source within the type's bound."""

import numpy as np

from clover_convert import chunks
from clover_convert.gguf_file import padding
from clover_cpp import ggml
from clover_cpp.errors import ResourceError

# Bound of a block's error: root mean square, relative to the block's largest magnitude. Twice what Gaussian weights reach; the
# values of a wrong row reach about 0.5, and what no type does is to leave the range of a block.
BOUNDS = {
    "f32": 0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.006,
    "q4_0": 0.1, "q4_1": 0.1, "q5_0": 0.05, "q5_1": 0.05, "q2_k": 0.27, "q3_k": 0.13, "q4_k": 0.065, "q5_k": 0.033, "q6_k": 0.016,
    "iq1_s": 0.45, "iq1_m": 0.5, "iq2_xxs": 0.3, "iq2_xs": 0.28, "iq2_s": 0.24, "iq3_xxs": 0.2, "iq3_s": 0.16,
    "iq4_nl": 0.1, "iq4_xs": 0.065, "mxfp4": 0.25,
}  # fmt: skip
SMALLEST = {"f16": 2**-25}  # half the spacing of what is below the type's normal numbers


def verify(job, paths, allow_non_finite=False):
    """Compare the files of a `conversion.Job` with what they were made from.

    Returns (share of its bound that the worst tensor reached, that tensor's name). Raises ResourceError naming the first tensor,
    or header, that is not as it should be.
    """
    worst, targets = (0.0, ""), iter(job.targets)
    for path, shard in zip(paths, job.shards, strict=True):
        with open(path, "rb") as file:
            if file.read(len(shard.header)) != shard.header:
                raise ResourceError(f"{path}: verification failed: the header is not what was written")
            for _ in shard.entries:
                target = next(targets)
                share = max(_share(file, path, chunk, job.config, allow_non_finite) for chunk in chunks.chunks(target))
                worst = max(worst, (share, target.tensor.name))
                file.read(len(padding(target.size)))
    return worst


def _share(file, path, chunk, config, allow_non_finite):
    kind, name = chunk.target.kind, chunk.target.tensor.name
    raw = np.frombuffer(file.read(chunk.size), np.uint8)
    if len(raw) != chunk.size:
        raise ResourceError(f"{path}: verification failed: the file ends inside tensor {name}")
    rows, _ = chunks.values(chunk, config, allow_non_finite)
    found = ggml.dequantize(kind, raw, rows.shape[-1])
    if kind.name == "f32":
        share = 0.0 if found.tobytes() == np.ascontiguousarray(rows, "<f4").tobytes() else np.inf
    else:
        finite = np.isfinite(rows)
        rows, found = np.where(finite, rows, 0).reshape(-1, kind.block), np.where(finite, found, 0).reshape(-1, kind.block)
        error = np.sqrt(np.square(found - rows, dtype=np.float64).mean(axis=1))
        bound = BOUNDS[kind.name] * np.abs(rows).max(axis=1) + SMALLEST.get(kind.name, 2**-24)
        share = float((error / bound).max())
    if not share <= 1:
        raise ResourceError(f"{path}: verification failed: tensor {name} is not what {chunk.spans[0][0].name} holds")
    return share
