"""The fork's llama-quantize on the architecture `clover`."""

import subprocess

import gguf
import pytest

from clover_cpp import Clover
from clover_tiny import tasks
from conftest import ROOT

KEPT = ("ssm_mem_gate.weight", "ssm_mem_gate.bias", "ssm_block_scale", "ssm_conv1d.weight", "ffn_gate_inp.weight")


def quantize(source, target, kind):
    command = [ROOT / "build" / "bin" / "llama-quantize", source, target, kind]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M"])
def test_quantised_file_keeps_the_small_tensors_and_still_answers(kind, library, bundled_gguf, tmp_path):
    target = tmp_path / "quantised.gguf"
    quantize(bundled_gguf("f32"), target, kind)
    assert target.stat().st_size < bundled_gguf("f32").stat().st_size / 2
    types = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(target).tensors}
    kept = [name for name in types if name.endswith(KEPT)]
    assert len(kept) == 3 * 4 + 6
    assert {types[name] for name in kept} == {gguf.GGMLQuantizationType.F32}
    (example,) = tasks.held_out("chat", 1, seed=2)
    with Clover(target) as clover:
        for mode in ("block", "ar"):
            assert "".join(clover.generate(example.messages, mode, max_tokens=40)).strip()


def test_q8_0_equals_the_converters(library, bundled_gguf, tmp_path):
    quantize(bundled_gguf("f32"), tmp_path / "quantised.gguf", "Q8_0")
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "quantised.gguf").tensors}
    ours = {tensor.name: tensor for tensor in gguf.GGUFReader(bundled_gguf("q8_0")).tensors}
    assert ours.keys() == theirs.keys()
    shared = [name for name in ours if ours[name].tensor_type == theirs[name].tensor_type == gguf.GGMLQuantizationType.Q8_0]
    assert len(shared) > 40
    for name in shared:
        assert (ours[name].data == theirs[name].data).all(), name
