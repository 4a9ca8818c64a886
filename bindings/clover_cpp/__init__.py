"""Clover models by block diffusion and autoregressively, from GGUF files: the Python side of libclover."""

from .engine import Clover, Generation
from .errors import (
    ArgumentError,
    BusyError,
    CheckpointError,
    CloverError,
    ContextFullError,
    EngineError,
    ModelFileError,
    ResourceError,
    TemplateError,
    UnsupportedError,
)
from .events import ModelInfo, Stats, Step, Text
from .importance import Importance

__all__ = [
    "ArgumentError",
    "BusyError",
    "CheckpointError",
    "Clover",
    "CloverError",
    "ContextFullError",
    "EngineError",
    "Generation",
    "Importance",
    "ModelFileError",
    "ModelInfo",
    "ResourceError",
    "Stats",
    "Step",
    "TemplateError",
    "Text",
    "UnsupportedError",
]
