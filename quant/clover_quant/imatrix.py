"""Importance matrices in llama.cpp's GGUF format: for each weight matrix, how large the inputs of its columns are.

Format (llama.cpp, tools/imatrix): general.type "imatrix"; for each tensor NAME two of float32: NAME.in_sum2 [matrices, columns],
sums of squared inputs, and NAME.counts [matrices, 1], how many inputs each matrix has seen.
"""

import hashlib
import math
import pathlib

import gguf
import numpy as np

from clover_cpp import outputs
from clover_cpp.errors import ArgumentError

SUMS, COUNTS = ".in_sum2", ".counts"
LARGEST = 1e20  # mean squared input: quantisers add up products with it in float32


class Imatrix:
    """Sums and counts by tensor name; `path` or None, `datasets` (texts), `chunks` (a count), `digest` of the file."""

    def __init__(self, path, sums, counts, datasets=(), chunks=0, digest=""):
        self.path, self.sums, self.counts = path and pathlib.Path(path), sums, counts
        self.datasets, self.chunks, self.digest = list(datasets), chunks, digest

    @classmethod
    def load(cls, path):
        """Read a file. Raises ArgumentError when it is none of this format, or damaged."""
        try:
            raw = pathlib.Path(path).read_bytes()
        except OSError as error:
            raise ArgumentError(f"{path}: {error.strerror}") from error
        if raw[:4] != b"GGUF":
            raise ArgumentError(f"{path}: not an importance matrix in GGUF format (the older .dat format is not read)")
        try:
            return cls._parse(path, gguf.GGUFReader(path), hashlib.sha256(raw).hexdigest())
        except ArgumentError:
            raise
        except Exception as error:  # the reader raises whatever damage leads to
            raise ArgumentError(f"{path}: damaged ({type(error).__name__}: {error})") from error

    @classmethod
    def _parse(cls, path, reader, digest):
        fields = {name: field.contents() for name, field in reader.fields.items()}
        if fields.get("general.type") != "imatrix":
            raise ArgumentError(f"{path}: a GGUF file, but no importance matrix")
        parts = {SUMS: {}, COUNTS: {}}
        for tensor in reader.tensors:
            name, dot, suffix = tensor.name.rpartition(".")
            if dot + suffix not in parts or tensor.tensor_type != gguf.GGMLQuantizationType.F32:
                raise ArgumentError(f"{path}: tensor {tensor.name!r} does not belong into an importance matrix")
            parts[dot + suffix][name] = np.array(tensor.data, np.float32)
        sums, counts = parts[SUMS], parts[COUNTS]
        for name in sums.keys() ^ counts.keys():
            raise ArgumentError(f"{path}: {name} has only one of {SUMS[1:]} and {COUNTS[1:]}")
        for name, values in sums.items():
            values, counted = values.reshape(-1, values.shape[-1]), counts[name].reshape(-1)
            if len(values) != len(counted):
                raise ArgumentError(f"{path}: {name} has {len(values)} rows of sums and {len(counted)} counts")
            if not (np.isfinite(values).all() and np.isfinite(counted).all() and (values >= 0).all() and (counted >= 0).all()):
                raise ArgumentError(f"{path}: {name} has values that are negative or not finite")
            sums[name], counts[name] = values, counted
            if (_means(values, counted) > LARGEST).any():
                raise ArgumentError(f"{path}: {name} has a mean square above {LARGEST:g}")
        if not sums:
            raise ArgumentError(f"{path}: an importance matrix without entries")
        datasets, chunks = fields.get("imatrix.datasets", []), fields.get("imatrix.chunk_count", 0)
        if not isinstance(datasets, list) or not all(isinstance(name, str) for name in datasets):
            raise ArgumentError(f"{path}: imatrix.datasets is no list of texts")
        if not isinstance(chunks, int) or not 0 <= chunks < 2**32:
            raise ArgumentError(f"{path}: imatrix.chunk_count is {chunks!r}")
        return cls(path, sums, counts, datasets, chunks, digest)

    def importance(self, name, shape):
        """Mean squared inputs of a tensor's columns, as llama-quantize takes them: float32 [matrices, columns], or None.

        shape: row-major; all dimensions before the last two count matrices. A matrix that was never used weighs all alike.
        Raises ArgumentError where the shape does not fit.
        """
        if name not in self.sums:
            return None
        sums, counts = self.sums[name], self.counts[name]
        matrices = math.prod(shape[:-2])
        if sums.shape != (matrices, shape[-1]):
            raise ArgumentError(f"{self.path}: {name} is {list(sums.shape)}, the model's tensor needs {[matrices, shape[-1]]}")
        return _means(sums, counts)

    def metadata(self):
        """The keys that a model quantised with it carries: (key, kind, value)."""
        keys = [
            ("quantize.imatrix.file", "str", self.path.name.encode("utf-8", "replace").decode() if self.path else ""),
            ("quantize.imatrix.entries_count", "u32", len(self.sums)),
            ("quantize.imatrix.chunks_count", "u32", self.chunks),
        ]
        return keys + [("quantize.imatrix.dataset", "str", str(name)) for name in self.datasets[:1]]

    def save(self, path, chunk_size):
        """Write the file, whole or not at all; chunk_size: tokens of a chunk. Raises ArgumentError where it cannot be written."""
        outputs.check(path)
        outputs.replace(path, lambda part: self._write(part, chunk_size))

    def _write(self, path, chunk_size):
        writer = gguf.GGUFWriter(path, "imatrix")
        writer.add_type("imatrix")
        writer.add_array("imatrix.datasets", [str(name) for name in self.datasets])
        writer.add_uint32("imatrix.chunk_count", self.chunks)
        writer.add_uint32("imatrix.chunk_size", chunk_size)
        for name in sorted(self.sums):
            writer.add_tensor(name + SUMS, np.ascontiguousarray(self.sums[name], np.float32))
            writer.add_tensor(name + COUNTS, np.ascontiguousarray(self.counts[name], np.float32).reshape(-1, 1))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _means(sums, counts):
    """Mean squares, float32 [matrices, columns]; 1 throughout a matrix that was never used."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(counts[:, None] > 0, sums / counts[:, None], np.float32(1)).astype(np.float32)
