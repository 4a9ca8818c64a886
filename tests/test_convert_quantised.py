"""Every type the converter writes, byte for byte against an unmodified llama.cpp's llama-quantize, with and without importance."""

import dataclasses
import math
import shutil
import subprocess

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import tiny_qwen
from clover_convert import chunks, convert
from clover_cpp import ggml
from clover_cpp.errors import ArgumentError
from clover_quant import recipes
from clover_quant.imatrix import Imatrix

# Every row of a matrix is a multiple of 256, the longest block; the value heads are reordered.
WIDE = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 24,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "num_experts": 3,
}
# type -> llama-quantize's name of a file of it
FILES = {
    "f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1", "q5_0": "Q5_0", "q5_1": "Q5_1",
    "q6_k": "Q6_K", "q5_k": "Q5_K_S", "q4_k": "Q4_K_S", "q3_k": "Q3_K_S", "q2_k": "Q2_K", "iq4_nl": "IQ4_NL", "iq4_xs": "IQ4_XS",
    "iq3_s": "IQ3_S", "iq3_xxs": "IQ3_XXS", "iq2_s": "IQ2_S", "mxfp4": "MXFP4_MOE",
}  # fmt: skip
FLOATS = ("f32", "f16", "bf16")
# what llama-quantize refuses without importance (src/llama-quant.cpp, tensor_requires_imatrix)
NEED_IMPORTANCE = ("iq3_xxs", "iq2_s")
SLOW = ("iq3_s", *NEED_IMPORTANCE)
EMBEDDING = "model.embed_tokens.weight"


def hard_rows(shape):
    """float32 with every kind of difficulty: scales from denormal to huge, ties, zeros, signed zeros, powers of two."""
    random = np.random.default_rng(5)
    rows = random.standard_normal(shape) * 10.0 ** random.integers(-12, 5, (shape[0], 1))
    rows = np.clip(rows, -60000, 60000).astype(np.float32)
    rows[0] = 0
    rows[1] = -0.0
    rows[2] = np.arange(shape[1]) - 32 + 0.5
    rows[3] = np.float32(1e-42)
    rows[4] = np.linspace(-127, 127, shape[1], dtype=np.float32)
    rows[5], rows[5, ::32] = 0.5, 127  # q8_0's scale is 1: every value a tie
    rows[6], rows[6, ::32] = np.nextafter(np.float32(0.5), np.float32(0)), 127  # just below a tie
    rows[7], rows[7, ::32] = -2.5, -127
    rows[8], rows[8, 5] = 0, 1
    return rows


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide") / "wide-qwen"
    tiny_qwen(folder, **WIDE)
    tensors = load_file(folder / "model.safetensors")
    tensors[EMBEDDING] = torch.from_numpy(hard_rows(tuple(tensors[EMBEDDING].shape)))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def base(wide):
    """The checkpoint as a GGUF in float32, which llama-quantize starts from."""
    convert(wide, wide.with_suffix(".f32.gguf"), "f32")
    return wide.with_suffix(".f32.gguf")


def write_imatrix(path, model):
    """An importance matrix of all matrices of a model, in llama.cpp's format; columns of no weight, and an expert never used."""
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["first.txt", "second.txt"])
    writer.add_uint32("imatrix.chunk_count", 12)
    writer.add_uint32("imatrix.chunk_size", 512)
    for tensor in gguf.GGUFReader(model).tensors:
        if len(tensor.shape) < 2 or "conv1d" in tensor.name:
            continue
        columns, matrices = int(tensor.shape[0]), math.prod(int(n) for n in tensor.shape[2:])
        sums = random.chisquare(1, (matrices, columns)).astype(np.float32) * 1000
        counts = random.integers(1, 300, (matrices, 1)).astype(np.float32)
        sums[:, 17:20] = 0
        if matrices > 1:
            sums[2], counts[2] = 0, 0
        writer.add_tensor(tensor.name + ".in_sum2", sums)
        writer.add_tensor(tensor.name + ".counts", counts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def imatrix(base):
    return write_imatrix(base.with_name("imatrix.gguf"), base)


def pure(kind):
    """The recipe of all matrices in one type."""
    return dataclasses.replace(recipes.load(kind), default=kind, rules=())


def upstream(program, base, target, kind, imatrix=None):
    """Tensors by name of what llama-quantize makes of a float32 model with all matrices of one type."""
    command = [program, "--pure", "--tensor-type", f".*={kind}", *(["--imatrix", imatrix] if imatrix else [])]
    result = subprocess.run([*command, base, target, FILES[kind]], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return gguf.GGUFReader(target)


def assert_same(ours, theirs, kind):
    """Every tensor is the same, but those that we never store in less than float32."""
    number = gguf.GGMLQuantizationType(ggml.types()[kind].number)
    theirs = {tensor.name: tensor for tensor in theirs.tensors}
    assert len(ours.tensors) == len(theirs)
    quantised = 0
    for tensor in ours.tensors:
        other = theirs[tensor.name]
        assert list(tensor.shape) == list(other.shape)
        if tensor.tensor_type == number:
            quantised += 1
            assert other.tensor_type == number, tensor.name
            assert tensor.data.tobytes() == other.data.tobytes(), tensor.name
        else:
            assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
            assert "ssm_" in tensor.name or other.data.tobytes() == tensor.data.tobytes(), tensor.name
    assert quantised >= 2 + 9 + 10


def params(without):
    """The types but some, as parameters of a test."""
    return [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in FILES if kind not in without]


@pytest.mark.parametrize("kind", params(without=NEED_IMPORTANCE))
def test_bytes_equal_those_of_llama_quantize(wide, base, plain_quantize, tmp_path, kind):
    convert(wide, tmp_path / "ours.gguf", pure(kind), threads=3)
    theirs = upstream(plain_quantize, base, tmp_path / "theirs.gguf", kind)
    assert_same(gguf.GGUFReader(tmp_path / "ours.gguf"), theirs, kind)


@pytest.mark.parametrize("kind", params(without=FLOATS))
def test_bytes_with_importance_equal_those_of_llama_quantize(wide, base, imatrix, plain_quantize, tmp_path, kind):
    result = convert(wide, tmp_path / "ours.gguf", pure(kind), imatrix=Imatrix.load(imatrix), verify=True)
    assert 0 < result.worst.ratio < 1
    ours, theirs = gguf.GGUFReader(tmp_path / "ours.gguf"), upstream(plain_quantize, base, tmp_path / "theirs.gguf", kind, imatrix)
    assert_same(ours, theirs, kind)
    for key in ("file_type", "quantization_version"):
        ours_value = ours.get_field(f"general.{key}")
        assert ours_value.contents() == theirs.get_field(f"general.{key}").contents()
        assert ours_value.types == theirs.get_field(f"general.{key}").types
    for key in ("dataset", "entries_count", "chunks_count"):
        ours_value, value = ours.get_field(f"quantize.imatrix.{key}"), theirs.get_field(f"quantize.imatrix.{key}")
        assert ours_value.contents() == value.contents() and ours_value.types == value.types, key
    assert str(imatrix).endswith(ours.get_field("quantize.imatrix.file").contents())


@pytest.mark.parametrize("kind", ["q8_0", "q4_k", "iq4_xs"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_give_the_bytes_of_their_float32_values(wide, tmp_path, kind, dtype):
    half, single = shutil.copytree(wide, tmp_path / "half" / "m"), shutil.copytree(wide, tmp_path / "single" / "m")
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(wide / "model.safetensors").items()}
    save_file(tensors, half / "model.safetensors")
    save_file({name: tensor.float() for name, tensor in tensors.items()}, single / "model.safetensors")
    convert(half, tmp_path / "half.gguf", kind)
    convert(single, tmp_path / "single.gguf", kind)
    assert (tmp_path / "half.gguf").read_bytes() == (tmp_path / "single.gguf").read_bytes()


def test_threads_do_not_change_the_bytes(wide, imatrix, tmp_path):
    for threads in (1, 2, 7):
        convert(wide, tmp_path / f"{threads}.gguf", "iq4_xs", imatrix=Imatrix.load(imatrix), threads=threads)
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_small_chunks_do_not_change_the_bytes(wide, imatrix, tmp_path, monkeypatch):
    """Chunks that end inside pieces, heads and matrices."""
    convert(wide, tmp_path / "whole.gguf", "q3_k", imatrix=Imatrix.load(imatrix))
    for size in (1, 7 * 256, 33 * 256):
        monkeypatch.setattr(chunks, "CHUNK", size)
        convert(wide, tmp_path / "chunks.gguf", "q3_k", imatrix=Imatrix.load(imatrix))
        assert (tmp_path / "chunks.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()


def test_numbers_and_block_sizes_equal_those_of_the_gguf_package():
    for name, kind in ggml.types().items():
        assert kind.number == gguf.GGMLQuantizationType[name.upper()]
        assert (kind.block, kind.block_bytes) == gguf.GGML_QUANT_SIZES[kind.number]


def test_importance_of_another_model_is_refused(base, tmp_path):
    tiny_qwen(tmp_path / "other", **{**WIDE, "moe_intermediate_size": 512})
    imatrix = Imatrix.load(write_imatrix(tmp_path / "imatrix.gguf", base))
    with pytest.raises(ArgumentError, match="imatrix.gguf: blk.0.ffn_down_exps.weight"):
        convert(tmp_path / "other", tmp_path / "m.gguf", "q4_k", imatrix=imatrix)
    assert not list(tmp_path.glob("m.gguf*"))
