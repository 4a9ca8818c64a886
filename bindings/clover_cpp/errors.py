"""The one family of exceptions the project raises.

Every error a user can meet is a :class:`CloverError`; its message says what is wrong, where, and
(if there is something to do) what to do. Programming mistakes keep Python's own exceptions.
"""


class CloverError(Exception):
    """Base of all errors of this project."""


class CheckpointError(CloverError):
    """A Hugging Face checkpoint folder is incomplete, damaged or of a kind we do not read."""


class ModelFileError(CloverError):
    """A GGUF file is missing, damaged, truncated or of an architecture we do not run."""


class UnsupportedError(CloverError):
    """The request is valid but this model cannot do it (block decoding of an autoregressive model)."""


class ContextFullError(CloverError):
    """The prompt does not fit into what is left of the context."""


class ArgumentError(CloverError, ValueError):
    """A parameter is out of its range; also a :class:`ValueError`."""


class BusyError(CloverError):
    """Another thread is using this :class:`~clover_cpp.Clover`, or it was used inside one of its own callbacks."""


class TemplateError(CloverError):
    """The model's chat template is missing, broken, or refuses the messages."""


class ResourceError(CloverError):
    """Out of memory, or a native library is missing or does not fit."""


class EngineError(CloverError):
    """The engine failed while it evaluated the model (the message has the native log's cause)."""
