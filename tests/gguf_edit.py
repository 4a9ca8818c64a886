"""GGUF files with one fact changed, byte by byte: what no writer would write."""

import struct

TYPES = {"u32": (4, "<I"), "i32": (5, "<i"), "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q"), "f64": (12, "<d")}
STRING, ARRAY = 8, 9
F32, F16, Q8_1, I8, I32, F64 = 0, 1, 9, 24, 26, 28  # tensor types


def _string(text):
    return struct.pack("<Q", len(text)) + text


def value(kind, content):
    """The bytes of a metadata value, type first: content a number, a text, or a list of numbers."""
    if kind == "str":
        return struct.pack("<I", STRING) + _string(content.encode())
    code, form = TYPES[kind]
    if isinstance(content, list):
        return struct.pack("<IIQ", ARRAY, code, len(content)) + b"".join(struct.pack(form, number) for number in content)
    return struct.pack("<I", code) + struct.pack(form, content)


def with_key(data, key, kind, content):
    """The file `data` with a metadata key of that value; one it has already is renamed."""
    old = _string(key.encode())
    renamed = data.count(old)
    data = data.replace(old, old[:-1] + b"~", 1)
    added = old + value(kind, content)
    filler = _string(f"filler of {key}".encode()) + struct.pack("<I", STRING)
    filler += _string(b"." * (-(len(added) + len(filler) + 8) % 32))  # the tensors stay aligned
    n_kv = struct.unpack_from("<Q", data, 16)[0] + 2
    assert renamed <= 1
    return data[:16] + struct.pack("<Q", n_kv) + added + filler + data[24:]


def with_tensor_type(data, name, kind):
    """The file `data` with another type number for a tensor, its bytes as they were."""
    place = data.index(_string(name.encode())) + 8 + len(name)
    n_dims = struct.unpack_from("<I", data, place)[0]
    place += 4 + 8 * n_dims
    return data[:place] + struct.pack("<I", kind) + data[place + 4 :]
