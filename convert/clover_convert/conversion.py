"""The conversion: read and check everything, then stream one tensor after the other into the output, in one pass."""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import os
import pathlib

from clover_convert import chunks
from clover_convert.checkpoint import Checkpoint
from clover_convert.config import read_config
from clover_convert.gguf_file import Entry, layout, padding
from clover_convert.metadata import model_metadata
from clover_convert.partial import Partial
from clover_convert.pipeline import in_order
from clover_convert.tensors import plan
from clover_convert.tokenizer import tokenizer_metadata
from clover_convert.verification import Worst, verify_files
from clover_cpp import outputs
from clover_cpp.errors import ArgumentError, CheckpointError, ModelFileError
from clover_quant import recipes, shards
from clover_quant.imatrix import Imatrix


@dataclasses.dataclass(frozen=True)
class Job:
    """All that is known before any tensor is read: `chunks.Target`s, the output's `Shard`s."""

    checkpoint: Checkpoint
    config: object
    recipe: recipes.Recipe
    targets: list
    shards: list
    imatrix: Imatrix | None = None

    @property
    def size(self):
        """Bytes of the output."""
        return sum(shard.size for shard in self.shards)

    def paths(self, output):
        """Final paths of an output's files. A symbolic link is followed where it is one file."""
        target = pathlib.Path(os.path.realpath(output))
        names = shards.names(pathlib.Path(output).name, len(self.shards))
        return [target.with_name(name) for name in names] if len(names) > 1 else [target]

    def inputs(self):
        """Paths of all files that it reads."""
        own = [self.recipe.path, self.imatrix and self.imatrix.path]
        return [*self.checkpoint.inputs(), *filter(None, own)]

    def check_output(self, output):
        """Raise ArgumentError where an output cannot be written."""
        outputs.check_all(self.paths(output), self.inputs())

    def without_importance(self):
        """Names of the layers' quantised matrices that the importance matrix says nothing about."""
        names = [target.tensor.name for target in self.targets if target.kind.block > 1 and target.importance is None]
        return [name for name in names if name.startswith("blk.")] if self.imatrix is not None else []


@dataclasses.dataclass(frozen=True)
class Result:
    """What was written: paths, bytes of all, and how many values that are not finite each source tensor had, where allowed."""

    paths: list
    size: int
    odd: dict
    worst: Worst | None  # of the verification


@dataclasses.dataclass(frozen=True)
class Source:
    """What an open checkpoint holds, whatever it is converted to: `outputs` as `tensors.plan` gives them."""

    checkpoint: Checkpoint
    config: object
    outputs: list
    tokenizer: list

    def metadata(self, file_type):
        """Metadata (key, kind, value) of a file of llama.cpp's type number."""
        return model_metadata(self.config, self.checkpoint.name, file_type) + self.tokenizer


def read(checkpoint):
    """The `Source` of an open `Checkpoint`; errors as for `convert`."""
    config = read_config(checkpoint.config)
    return Source(checkpoint, config, plan(checkpoint.open_tensors(), config), tokenizer_metadata(checkpoint, config))


def targets(source, recipe, imatrix=None):
    """The `chunks.Target`s of a `Source` by a `Recipe`."""
    if imatrix is not None and not any(output.name in imatrix.sums for output in source.outputs):
        raise ArgumentError(
            f"{imatrix.path}: none of its entries is of a tensor of this model (one is {next(iter(imatrix.sums), 'there is none')})"
        )
    found = []
    for output, kind in zip(source.outputs, recipe.types(source.outputs, source.config.num_hidden_layers, imatrix), strict=True):
        importance = imatrix.importance(output.name, output.shape) if imatrix is not None and kind.block > 1 else None
        if kind.needs_importance and importance is None:
            raise ArgumentError(f"type {kind.name} needs importance, and the importance matrix has none for {output.name}")
        found.append(chunks.Target(output, kind, importance))
    return found


def outline(source, recipe, imatrix=None):
    """(metadata, bytes of all tensors) of a `Source` by a `Recipe`, as `clover_quant.fit` asks for them."""
    metadata = {key: value for key, _, value in source.metadata(recipe.file_type)}
    return metadata, sum(target.size for target in targets(source, recipe, imatrix))


def prepare(source, recipe, imatrix=None, split_max_size=None):
    """The `Job` of converting a `Source` by a `Recipe`; arguments and errors as for `convert`."""
    metadata = source.metadata(recipe.file_type) + (imatrix.metadata() if imatrix is not None else [])
    found = targets(source, recipe, imatrix)
    entries = [Entry(target.tensor.name, target.tensor.shape, target.kind.number, target.size) for target in found]
    return Job(source.checkpoint, source.config, recipe, found, layout(metadata, entries, split_max_size), imatrix)


def convert(
    source,
    output,
    type="q8_0",
    *,
    imatrix=None,
    split_max_size=None,
    resume=False,
    verify=False,
    allow_non_finite=False,
    threads=0,
    progress=None,
):
    """Convert a checkpoint to a GGUF file (or several) and return a `Result`.

    source: a Clover or Qwen3.5/3.6-MoE checkpoint: a folder (config.json, safetensors, tokenizer), or an open `Checkpoint`.
    output: path of the GGUF; it appears, or replaces an older file, only when it is whole. Interrupted, what is done stays beside
    it (`partial.partial_path`); a failure of the checkpoint leaves nothing.
    type: a recipe (clover_quant.recipes: name, ggml type, path of a TOML file, or a `Recipe`).
    imatrix: a `clover_quant.imatrix.Imatrix`, or None. split_max_size: most bytes of tensors in a file; the output's name then
    is NAME-00001-of-0000N.gguf. resume: go on where an interrupted run stopped. verify: read the output back and compare.
    allow_non_finite: keep NaN and infinities (0 in types of blocks). threads: 0 for all cores.
    progress: called with (bytes written, bytes in all).
    Raises CheckpointError for a checkpoint that cannot be converted, ResourceError when writing fails, ModelFileError when the
    verification finds a difference, ArgumentError for an unknown type, an importance matrix of another model, an output that cannot
    be written or is an input, or a partial one that is in the way, damaged or made from something else. Memory use does not depend
    on the size of the checkpoint.
    """
    recipe = type if isinstance(type, recipes.Recipe) else recipes.load(type)
    with contextlib.nullcontext(source) if isinstance(source, Checkpoint) else Checkpoint(source) as checkpoint:
        job = prepare(read(checkpoint), recipe, imatrix, split_max_size)
        return run(job, output, resume, verify, allow_non_finite, threads, progress)


def run(job, output, resume=False, check=False, allow_non_finite=False, threads=0, progress=None):
    """Carry out a `Job`; arguments and errors as for `convert`."""
    threads = threads or os.cpu_count() or 1
    partial = Partial(
        output,
        job.paths(output),
        [shard.size for shard in job.shards],
        _identity(job, allow_non_finite),
        resume,
        job.inputs(),
    )
    try:
        odd = partial.state.setdefault("not finite", {})
        for data, found in _stream(job, partial.written, allow_non_finite, threads):
            partial.write(data)
            for name, count in found.items():
                odd[name] = [a + b for a, b in zip(odd.get(name, [0, 0]), (count.nan, count.infinite), strict=True)]
            partial.sync_if_due()
            if progress:
                progress(partial.written, job.size)
        worst = None
        if check:
            partial.flush()
            worst = verify_files(partial.open_paths(), job.shards, job.targets, job.config, threads, allow_non_finite, progress)
        partial.commit()
    except (CheckpointError, ModelFileError):
        partial.discard()
        raise
    except BaseException:
        partial.keep()
        raise
    finally:
        partial.close()
    return Result(partial.targets, job.size, {name: chunks.Odd(*counts) for name, counts in odd.items()}, worst)


def _identity(job, allow_non_finite):
    headers = hashlib.sha256(b"".join(shard.header for shard in job.shards)).hexdigest()
    return {
        "the checkpoint": job.checkpoint.fingerprint(),
        "the tokenizer, or the recipe or another option": headers,
        "the importance matrix": job.imatrix.digest if job.imatrix is not None else "",
        "--allow-non-finite": str(allow_non_finite),
        "clover-convert itself": f"chunks of {chunks.CHUNK}",
    }


def _parts(job):
    """What the output is made of, in order: (bytes, data or a `chunks.Chunk`)."""
    targets = iter(job.targets)
    for shard in job.shards:
        yield len(shard.header), shard.header
        for target in itertools.islice(targets, len(shard.entries)):
            for chunk in chunks.chunks(target):
                yield chunk.size, chunk
            yield len(padding(target.size)), padding(target.size)


def _stream(job, start, allow_non_finite, threads):
    """(bytes, `chunks.Odd` by name) of each part from the byte `start` on, made by several threads ahead of the reader."""
    pool = concurrent.futures.ThreadPoolExecutor(threads, "quantise")
    try:
        yield from in_order(pool, threads, _calls(job, start, allow_non_finite))
    finally:
        pool.shutdown(cancel_futures=True)


def _calls(job, start, allow_non_finite):
    at = 0
    for size, part in _parts(job):
        at += size
        if at <= start or not size:
            continue
        if isinstance(part, chunks.Chunk):
            yield chunks.encode, part, job.config, allow_non_finite
        else:
            yield lambda data: (data, {}), part
