"""The layout of a GGUF file (version 3, little-endian), one file or several: headers and sizes, known before any tensor is read.

Format: ggml's docs/gguf.md. Keys of a split file follow llama.cpp's tools/gguf-split.
"""

import dataclasses
import struct

from clover_cpp.errors import ArgumentError

ALIGNMENT = 32
ARRAY = 9
STRING = 8
SCALARS = {
    "u8": (0, "<B"), "u16": (2, "<H"), "i32": (5, "<i"), "u32": (4, "<I"), "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q"),
}  # fmt: skip
MOST_SHARDS = 65535  # split.count has 16 bits


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


def padding(length):
    """The zero bytes that follow `length` bytes."""
    return bytes(-length % ALIGNMENT)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor's line in a file's table: shape in row-major order (last dimension contiguous), ggml's type number, bytes."""

    name: str
    shape: tuple
    type: int
    size: int

    @property
    def padded(self):
        """Bytes in the file, with the padding that follows."""
        return self.size + len(padding(self.size))


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file of a model: its header (metadata and tensor table, padded) and its tensors, whose bytes follow in this order."""

    header: bytes
    entries: list

    @property
    def size(self):
        """Bytes of the file."""
        return len(self.header) + sum(entry.padded for entry in self.entries)


def layout(metadata, entries, max_size=None):
    """The files of a model as a list of `Shard`: one, or as many as keep each file's tensors within `max_size` bytes.

    metadata: (key, kind, value). A tensor is never divided: one that is larger than `max_size` has a file of its own.
    Raises ArgumentError where that would make too many files.
    """
    groups = [[]]
    for entry in entries:
        if max_size and groups[-1] and sum(e.padded for e in groups[-1]) + entry.padded > max_size:
            groups.append([])
        groups[-1].append(entry)
    if len(groups) > MOST_SHARDS:
        raise ArgumentError(f"a split at {max_size} bytes makes {len(groups)} files, more than {MOST_SHARDS}")
    if len(groups) == 1:
        return [Shard(_header(metadata, entries), entries)]
    shards = []
    for number, group in enumerate(groups):
        split = [
            ("split.no", "u16", number),
            ("split.count", "u16", len(groups)),
            ("split.tensors.count", "i32", len(entries)),
        ]
        shards.append(Shard(_header((metadata if number == 0 else []) + split, group), group))
    return shards


def _header(metadata, entries):
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(entries), len(metadata))]
    parts += [_string(key) + _value(kind, value) for key, kind, value in metadata]
    offset = 0
    for entry in entries:
        dims = struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *reversed(entry.shape))
        parts.append(_string(entry.name) + dims + struct.pack("<IQ", entry.type, offset))
        offset += entry.padded
    header = b"".join(parts)
    return header + padding(len(header))
