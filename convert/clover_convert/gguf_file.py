"""Writing a GGUF file (version 3, little-endian) front to back: header, metadata, tensor table, then tensor bytes as they come.

Format: ggml's docs/gguf.md. All sizes are known beforehand, so nothing is kept in memory and nothing is rewritten.
"""

import contextlib
import os
import pathlib
import secrets
import stat
import struct

from clover_cpp.errors import CheckpointError, ResourceError

ALIGNMENT = 32
ARRAY = 9
STRING = 8
SCALARS = {"u8": (0, "<B"), "i32": (5, "<i"), "u32": (4, "<I"), "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q")}


def _string(text):
    raw = text.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(kind, value):
    """Bytes of a metadata value with its type; `kind` is a key of SCALARS, "str", or either in brackets for an array."""
    if not kind.startswith("["):
        return (
            struct.pack("<I", STRING) + _string(value)
            if kind == "str"
            else struct.pack("<I", SCALARS[kind][0]) + struct.pack(SCALARS[kind][1], value)
        )
    item = kind[1:-1]
    number, items = (
        (STRING, map(_string, value)) if item == "str" else (SCALARS[item][0], (struct.pack(SCALARS[item][1], v) for v in value))
    )
    return struct.pack("<IIQ", ARRAY, number, len(value)) + b"".join(items)


def _padding(length):
    return b"\0" * (-length % ALIGNMENT)


class GGUFWriter:
    """Writes into an open binary file. `metadata`: (key, kind, value); `tensors`: (name, shape, ggml type, bytes).

    Shapes are in row-major order (last dimension contiguous), as numpy has them. After construction, give the tensors' bytes
    in the same order: `write` any number of times, then `end_tensor`, for each.
    """

    def __init__(self, file, metadata, tensors):
        self._file = file
        head = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(metadata))]
        head += [_string(key) + _value(kind, value) for key, kind, value in metadata]
        offset = 0
        for name, shape, ggml_type, size in tensors:
            head.append(_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), ggml_type, offset))
            offset += size + len(_padding(size))
        head = b"".join(head)
        file.write(head + _padding(len(head)))
        self.data_bytes = sum(size for *_, size in tensors)
        self._sizes = [size for *_, size in tensors]
        self._written = 0

    def write(self, array):
        """Add the bytes of a numpy array to the current tensor; returns their number."""
        self._file.write(array.tobytes())
        self._written += array.nbytes
        return array.nbytes

    def end_tensor(self):
        """Close the current tensor; it must have got exactly the bytes it was declared with."""
        expected = self._sizes.pop(0)
        assert self._written == expected, (self._written, expected)
        self._file.write(_padding(expected))
        self._written = 0


@contextlib.contextmanager
def whole_file(path, inputs=()):
    """Open `path` for writing so that it appears, or replaces an older file, only when the block ends without an error.

    A symbolic link stays one: the file it leads to is written. Raises CheckpointError when the folder does not exist, or `path`
    is one of the files `inputs` or no regular file; ResourceError when writing fails.
    """
    path = pathlib.Path(path)
    part = None
    try:
        target = pathlib.Path(os.path.realpath(path))
        _check_target(path, target, inputs)
        part = target.with_name(f".{target.name[:50]}.{secrets.token_hex(4)}.part")
        with open(part, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if part:
            with contextlib.suppress(OSError):
                part.unlink()


def _check_target(path, target, inputs):
    try:
        found = target.stat()
    except (FileNotFoundError, NotADirectoryError):
        if not target.parent.is_dir():
            raise CheckpointError(f"cannot write {path}: there is no folder {path.parent}") from None
        return
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"cannot write {path}: it is {'a folder' if stat.S_ISDIR(found.st_mode) else 'no regular file'}")
    if any(os.path.samestat(found, os.stat(file)) for file in inputs):
        raise CheckpointError(f"cannot write {path}: it is a file of the checkpoint")
