"""The converter's number formats, bit by bit against the `gguf` package (itself checked upstream against ggml)."""

import gguf
import numpy as np
import pytest

from clover_convert.encodings import ENCODINGS, EncodingError


def hard_rows():
    """float32 rows with every kind of difficulty: scales from denormal to huge, ties, zeros, signed zeros, powers of two."""
    random = np.random.default_rng(5)
    rows = random.standard_normal((4000, 64)) * 10.0 ** random.integers(-12, 5, (4000, 1))
    rows = np.clip(rows, -60000, 60000).astype(np.float32)
    rows[0] = 0
    rows[1] = -0.0
    rows[2] = np.arange(64) - 32 + 0.5  # ties once the largest is 127 / 2
    rows[3, :] = np.float32(1e-42)
    rows[4] = np.linspace(-127, 127, 64, dtype=np.float32)
    rows[5, :32], rows[5, 0] = 0.5, 127  # scale 1: every value a tie
    rows[6, :32], rows[6, 0] = np.nextafter(np.float32(0.5), np.float32(0)), 127  # just below a tie
    rows[7, :32], rows[7, 0] = -2.5, -127
    return rows


@pytest.mark.parametrize("type", list(ENCODINGS))
@pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide)")
def test_bytes_equal_those_of_the_gguf_package(type):
    rows = hard_rows()
    wanted = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[type.upper()])
    assert ENCODINGS[type].encode(rows).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("type", list(ENCODINGS))
def test_sizes_and_numbers_equal_those_of_the_gguf_package(type):
    number = gguf.GGMLQuantizationType[type.upper()]
    encoding = ENCODINGS[type]
    assert encoding.ggml_type == number
    assert (encoding.block, encoding.block_bytes) == gguf.GGML_QUANT_SIZES[number]
    names = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
    assert encoding.file_type == gguf.LlamaFileType[names[type]]


@pytest.mark.parametrize("type", list(ENCODINGS))
@pytest.mark.filterwarnings("error")
def test_tiny_values_are_no_warning_and_read_back_as_nearly_zero(type):
    rows = np.zeros((4, 32), np.float32)
    rows[:, :8] = np.float32([1e-45, 1e-42, 1e-38, 1e-30])[:, None]
    raw = ENCODINGS[type].encode(rows).view(np.uint8).reshape(4, -1)
    found = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type.upper()])
    assert np.abs(found - rows).max() <= 1e-30


def test_f16_takes_its_largest_value_and_refuses_the_next():
    largest = np.full((1, 32), 65504, np.float32)
    assert ENCODINGS["f16"].encode(largest)[0, 0] == 65504
    with pytest.raises(EncodingError, match="65536.*bf16"):
        ENCODINGS["f16"].encode(np.full((1, 32), 65536, np.float32))


@pytest.mark.parametrize("type, value", [("bf16", 3.4e38), ("q8_0", 1e7)])
def test_values_beyond_the_type_are_refused(type, value):
    with pytest.raises(EncodingError, match="use --type"):
        ENCODINGS[type].encode(np.full((1, 32), value, np.float32))
