"""What a GGUF file says about its model: metadata, and the tensors' names, shapes and sizes."""

import dataclasses
import math

import gguf

from clover_cpp.errors import ArgumentError, ModelFileError
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
    """(metadata, list of `Tensor`) of a GGUF file: key -> value, of the large tables only something as long.

    Raises ModelFileError for a file that is missing, damaged, or one of several, and ArgumentError for one of float32 throughout:
    it does not tell which tensors must stay so.
    """
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
    if metadata.get("split.count", 1) > 1:
        raise ModelFileError(f"{path}: one file of several")
    if metadata.get("general.file_type") == FILE_TYPES["ALL_F32"]:
        raise ArgumentError(f"{path}: a file of float32 throughout does not tell which tensors must stay so; take a BF16 one")
    return metadata, tensors
