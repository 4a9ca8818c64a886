"""The conversion: read and check everything, then stream one tensor after the other into the output."""

import math
import os

import numpy as np

from clover_convert.checkpoint import Checkpoint
from clover_convert.config import read_config
from clover_convert.encodings import ENCODINGS, EncodingError
from clover_convert.gguf_file import GGUFWriter, whole_file
from clover_convert.metadata import model_metadata
from clover_convert.tensors import plan
from clover_convert.tokenizer import tokenizer_metadata
from clover_cpp.errors import ArgumentError, CheckpointError

CHUNK = 1 << 20  # elements in memory at a time


def convert(folder, output, type="q8_0", progress=None):
    """Convert a checkpoint folder to a GGUF file and return the file's size in bytes.

    folder: a Clover or Qwen3.5/3.6-MoE checkpoint (config.json, safetensors, tokenizer.json), tensors in F32, F16 or BF16.
    output: path of the GGUF; it appears, or replaces an older file, only when it is whole.
    type: "f32", "f16", "bf16" or "q8_0", for the matrices; norms, routers, gates and other small tensors stay float32.
    progress: called with (bytes of tensors written, bytes in all).
    Raises CheckpointError for a checkpoint that cannot be converted, ResourceError when writing fails, ArgumentError for an
    unknown type. Memory use does not depend on the size of the checkpoint.
    """
    if type not in ENCODINGS:
        raise ArgumentError(f"unknown type {type!r}; known: {', '.join(ENCODINGS)}")
    with Checkpoint(folder) as checkpoint:
        config = read_config(checkpoint.config)
        outputs = plan(checkpoint.open_tensors(), config)
        name = checkpoint.folder.resolve().name.encode("utf-8", "replace").decode()  # a folder's name may be any bytes
        metadata = model_metadata(config, name, type) + tokenizer_metadata(checkpoint, config)
        entries = [_entry(tensor, type) for tensor in outputs]
        with whole_file(output, checkpoint.inputs()) as file:
            writer = GGUFWriter(file, metadata, [entry for entry, _ in entries])
            done = 0
            for tensor, (_, encoding) in zip(outputs, entries, strict=True):
                for source, rows in _chunks(tensor, config):
                    done += writer.write(_encode(source, encoding, rows))
                    if progress:
                        progress(done, writer.data_bytes)
                writer.end_tensor()
    return os.path.getsize(output)


def _entry(tensor, type):
    """The tensor's line in the GGUF's table, and its encoding; rows that do not divide into blocks stay float32."""
    encoding = ENCODINGS[type]
    if tensor.f32 or tensor.shape[-1] % encoding.block:
        encoding = ENCODINGS["f32"]
    size = math.prod(tensor.shape) // encoding.block * encoding.block_bytes
    return (tensor.name, tensor.shape, encoding.ggml_type, size), encoding


def _chunks(tensor, config):
    """A tensor to write as (name in the checkpoint, transformed float32 rows), a bounded number of rows at a time."""
    for source, start, stop in tensor.pieces:
        step = max(1, CHUNK // source.row_length)
        for first in range(start, stop, step):
            rows = source.rows(first, min(first + step, stop))
            _check_finite(rows, f"tensor {source.name!r} has values that are not finite (NaN or infinity)")
            if tensor.values:
                with np.errstate(over="ignore"):
                    rows = tensor.values(rows, config)
                _check_finite(rows, f"tensor {source.name!r} has values too large for {tensor.name}")
            yield source.name, rows


def _check_finite(rows, message):
    if not np.isfinite(rows).all():
        raise CheckpointError(message)


def _encode(name, encoding, rows):
    try:
        return encoding.encode(rows)
    except EncodingError as error:
        raise CheckpointError(f"tensor {name!r}: {error}") from error
