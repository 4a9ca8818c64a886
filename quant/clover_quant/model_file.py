"""What a GGUF file says about its model: metadata, and the tensors' names, shapes and sizes."""

import dataclasses
import math

import gguf

from clover_cpp.errors import ArgumentError, ModelFileError
from clover_quant import shards
from clover_quant.recipes import FILE_TYPES

TABLES = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.token_type", "tokenizer.ggml.scores")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a file: shape in row-major order, bytes; `f32`: it is stored in float32, and stays so by any recipe."""

    name: str
    shape: tuple
    size: int
    f32: bool

    @property
    def elements(self):
        """How many."""
        return math.prod(self.shape)


def read(path):
    """(metadata, list of `Tensor`) of a GGUF model: key -> value, of the large tables only something as long.

    path: of the file, or of the first of several. Raises ModelFileError for a file that is missing or damaged, or a later one of
    several, and ArgumentError for a model of float32 throughout: it does not tell which tensors must stay so.
    """
    metadata, tensors = _read(path)
    if metadata.get("split.no", 0) > 0:
        raise ModelFileError(f"{path}: a later file of several: give the first one's name")
    files = shards.paths(path)
    if metadata.get("split.count", 1) not in (0, len(files)):
        raise ModelFileError(f"{path}: the first of {metadata['split.count']} files, but its name is not one of those")
    for file in files[1:]:
        tensors += _read(file)[1]
    if metadata.get("general.file_type") == FILE_TYPES["ALL_F32"]:
        raise ArgumentError(f"{path}: a file of float32 throughout does not tell which tensors must stay so; take a BF16 one")
    return metadata, tensors


def _read(path):
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelFileError(f"{path}: not a GGUF file")
    except OSError as error:
        raise ModelFileError(f"{path}: {error.strerror}") from None
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.data if name in TABLES else field.contents() for name, field in reader.fields.items()}
        tensors = [
            Tensor(t.name, tuple(int(n) for n in reversed(t.shape)), int(t.n_bytes), t.tensor_type == gguf.GGMLQuantizationType.F32)
            for t in reader.tensors
        ]
    except Exception as error:  # the reader raises whatever damage leads to
        raise ModelFileError(f"{path}: damaged ({type(error).__name__}: {error})") from None
    return metadata, tensors
