"""Recipes against llama-quantize's own choice of types (its --dry-run), and files of one's own."""

import json
import os
import re
import subprocess
import sys

import gguf
import numpy as np
import pytest

from checkpoints import tiny_clover, tiny_qwen
from clover_convert import convert
from clover_convert.checkpoint import Checkpoint
from clover_convert.conversion import read, targets
from clover_cpp import ArgumentError, ggml
from clover_quant import recipes
from clover_quant.imatrix import Imatrix
from conftest import ROOT

AS_LLAMA_QUANTIZE = ["q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "iq4_xs", "mxfp4_moe"]
KEPT = re.compile(r"blk\.\d+\.ssm_(alpha|beta|mem_gate)\.weight")  # in float32 here, quantised there
# iq4_xs is the name of a recipe too; the others need importance
PURE = [kind for kind in ggml.NUMBERS if kind not in ("f32", "iq4_xs", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs")]
LINE = re.compile(r"\[ *\d+/ *\d+\] (\S+) .* type = +(\w+), size = +[\d.]+ MiB(?: -> +[\d.]+ MiB \((\w+)\))?")

# 16 layers, for rules by eighths and sixteenths. As the 35B-A3B: 4 heads or more for each of keys and values. Not 8 experts: there
# llama-quantize treats the attention apart.
DEEP = {
    "num_hidden_layers": 16,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 4,
    "num_attention_heads": 8,
    "num_experts": 4,
    "vocab_size": 1024,
}
SHAPES = {
    "wide": {**DEEP, "hidden_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 512},
    "narrow": {**DEEP, "hidden_size": 96, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 256},
    "tied": {**DEEP, "hidden_size": 256, "moe_intermediate_size": 32, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def models(library, tmp_path_factory):
    """Checkpoint and float32 GGUF of a shape."""
    made = {}

    def of(shape):
        if shape not in made:
            folder = tmp_path_factory.mktemp(shape)
            tiny_qwen(folder / "checkpoint", **SHAPES[shape])
            convert(folder / "checkpoint", folder / "model.gguf", type="f32")
            made[shape] = folder / "checkpoint", folder / "model.gguf"
        return made[shape]

    return of


def theirs(model, kind, *options):
    """Type of each tensor as llama-quantize chooses."""
    command = [ROOT / "build" / "bin" / "llama-quantize", "--dry-run", *options, model, kind.upper()]
    result = subprocess.run(command, capture_output=True, text=True)
    found = {match[1]: (match[3] or match[2]).lower() for match in LINE.finditer(result.stderr + result.stdout)}
    assert result.returncode == 0 and found, result.stderr
    return found


def ours(checkpoint, kind, imatrix=None):
    with Checkpoint(checkpoint) as opened:
        return {target.tensor.name: target.kind.name for target in targets(read(opened), recipes.load(kind), imatrix)}


def assert_equal_but_for_kept(mine, other):
    assert mine.keys() == other.keys()
    differ = {name: (mine[name], other[name]) for name in mine if mine[name] != other[name]}
    assert all(KEPT.fullmatch(name) and pair[0] == "f32" for name, pair in differ.items()), differ


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", AS_LLAMA_QUANTIZE)
def test_types_are_those_of_llama_quantize(name, shape, models):
    checkpoint, model = models(shape)
    assert_equal_but_for_kept(ours(checkpoint, name), theirs(model, name))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", PURE)
def test_one_type_for_all_falls_back_as_in_llama_quantize(kind, shape, models):
    checkpoint, model = models(shape)
    file_type = {"q3_k": "q3_k_s", "q4_k": "q4_k_s", "q5_k": "q5_k_s", "iq2_s": "iq2_m", "mxfp4": "mxfp4_moe"}.get(kind, kind)
    options = () if ggml.types()[kind].block == 1 else ("--pure",)
    assert_equal_but_for_kept(ours(checkpoint, kind), theirs(model, file_type, *options))


def test_types_with_importance_are_those_of_llama_quantize(models, tmp_path):
    checkpoint, model = models("wide")
    path = tmp_path / "imatrix.gguf"
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["text"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for tensor in gguf.GGUFReader(model).tensors:
        if len(tensor.shape) > 1:
            matrices = int(tensor.shape[2]) if len(tensor.shape) > 2 else 1
            writer.add_tensor(f"{tensor.name}.in_sum2", np.ones((matrices, int(tensor.shape[0])), np.float32))
            writer.add_tensor(f"{tensor.name}.counts", np.ones((matrices, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    for name in AS_LLAMA_QUANTIZE:
        chosen = ours(checkpoint, name, Imatrix.load(path))
        assert_equal_but_for_kept(chosen, theirs(model, name, "--imatrix", path))
    assert ours(checkpoint, "iq4_xs") != ours(checkpoint, "iq4_xs", Imatrix.load(path))


@pytest.mark.parametrize("name", recipes.names())
def test_small_tensors_stay_float32(name, library, tmp_path):
    """Routers, gates, convolutions and norms stay float32 by every recipe."""
    tiny_clover(tmp_path, block_size_head=True)
    chosen = ours(tmp_path, name)
    small = (
        "norm.weight",
        "conv1d.weight",
        "ssm_a",
        "ssm_dt.bias",
        "alpha.weight",
        "beta.weight",
        "mem_gate.weight",
        "mem_gate.bias",
    )
    small += ("block_scale", "gate_inp.weight", "gate_inp_shexp.weight", "block_size_head.weight", "block_size_head.bias")
    kept = {tensor for tensor, kind in chosen.items() if kind == "f32"}
    assert kept == {tensor for tensor in chosen if tensor.endswith(small)}


def test_numbers_of_file_types(library):
    code = "import json, llama_cpp; print(json.dumps({k: v for k, v in vars(llama_cpp).items() if k.startswith('LLAMA_FTYPE')}))"
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(library)}
    numbers = json.loads(subprocess.check_output([sys.executable, "-c", code], env=environment))
    for name, number in recipes.FILE_TYPES.items():
        assert number == numbers[f"LLAMA_FTYPE_{name}" if name == "ALL_F32" else f"LLAMA_FTYPE_MOSTLY_{name}"]


def test_edge_mixes_keep_large_matrices_off_q6_k(models):
    checkpoint, _ = models("wide")
    for name in recipes.names():
        if name.startswith("edge"):
            chosen = ours(checkpoint, name)
            assert "q6_k" not in chosen.values()
            assert chosen["blk.0.ssm_out.weight"] == "q8_0"


def write(folder, text):
    path = folder / "mine.toml"
    path.write_text(text)
    return path


HEAD = 'description = "mine"\nfile_type = "Q4_K_M"\ndefault = "q4_k"\n'


def test_a_file_of_ones_own(models, tmp_path):
    checkpoint, _ = models("wide")
    rules = (
        'rules = [{ match = "blk.?.ffn_down_exps*", layers = "first 1/4", type = "Q8_0" }, { match = "*_exps*", type = "iq4_nl" }]'
    )
    chosen = ours(checkpoint, write(tmp_path, HEAD + rules))
    assert [chosen[f"blk.{i}.ffn_down_exps.weight"] for i in range(16)] == ["q8_0"] * 4 + ["iq4_nl"] * 12
    assert chosen["blk.15.ffn_up_exps.weight"] == "iq4_nl" and chosen["output.weight"] == "q4_k"


RULE = '[{{ match = "blk.*.ffn*", {} }}]'
BROKEN = {
    "not TOML": ("descr", "not valid TOML"),
    "control character": ('description = "\x01"', "not valid TOML"),
    "deep": (HEAD + "rules = " + "[" * 100_000, "not valid TOML"),
    "empty": ("", "'description' is missing"),
    "no default": ('description = ""\nfile_type = "Q8_0"', "'default' is missing"),
    "unknown key": (HEAD + "speed = 1", "unknown key 'speed'"),
    "wrong kind": (HEAD.replace('"q4_k"', "4"), "'default' must be a str"),
    "file type": (HEAD.replace("Q4_K_M", "Q4_K_X"), "unknown file_type 'Q4_K_X'"),
    "default type": (HEAD.replace("q4_k", "q4_kk"), "unknown type 'q4_kk'"),
    "rules no list": (HEAD + "rules = 1", "'rules' must be a list"),
    "rule no table": (HEAD + "rules = [1]", "rule 1: not a table"),
    "no type": (HEAD + "rules = " + RULE.format('layers = "more"'), "rule 1: 'type' is missing"),
    "type of a rule": (HEAD + "rules = " + RULE.format('type = "q9"'), "rule 1: unknown type 'q9'"),
    "key of a rule": (HEAD + "rules = " + RULE.format('type = "q8_0", layer = 1'), "rule 1: unknown key 'layer'"),
    "layers": (HEAD + "rules = " + RULE.format('type = "q8_0", layers = "first 0"'), "rule 1: layers 'first 0' is none of"),
    "importance": (HEAD + "rules = " + RULE.format('type = "q8_0", importance = 1'), "rule 1: 'importance' must be a bool"),
}
NEVER = {
    "mistyped": ('{ match = "blk.*.ffn_dwn*", type = "q8_0" }', "rule 1: 'blk.*.ffn_dwn*' decides about no matrix"),
    "a float32 tensor": (
        '{ match = "blk.*.ssm_alpha.weight", type = "q8_0" }',
        "rule 1: 'blk.*.ssm_alpha.weight' decides about no",
    ),
    "taken before": (
        '{ match = "*", type = "q8_0" }, { match = "output.weight", type = "q6_k" }',
        "rule 2: 'output.weight' decides about no",
    ),
    "of no layer": ('{ match = "output.weight", layers = "more", type = "q8_0" }', "rule 1: 'output.weight' decides about no"),
    "taken in all layers": (
        '{ match = "blk.*", layers = "first 99", type = "q8_0" }, { match = "blk.0.*", type = "q6_k" }',
        "rule 2: 'blk.0.*' decides about no",
    ),
    "twice": (
        '{ match = "blk.*", type = "q8_0" }, { match = "blk.*", type = "q8_0" }',
        "rule 2: 'blk.*' decides about no",
    ),
    "taken with and without importance": (
        '{ match = "*", importance = true, type = "q8_0" }, { match = "*", importance = false, type = "q6_k" }, '
        '{ match = "blk.*", type = "q5_k" }',
        "rule 3: 'blk.*' decides about no",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files(case, tmp_path):
    text, message = BROKEN[case]
    path = write(tmp_path, text)
    with pytest.raises(ArgumentError) as caught:
        recipes.load(path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("case", NEVER)
def test_rules_that_can_never_apply(case, models, tmp_path):
    rules, message = NEVER[case]
    path = write(tmp_path, HEAD + f"rules = [{rules}]")
    with pytest.raises(ArgumentError) as caught:
        ours(models("wide")[0], path)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)


def test_rules_that_another_model_or_run_needs(models, tmp_path):
    rules = (
        'rules = [{ match = "blk.*_exps*", layers = "first 1/99", type = "q8_0" }, '
        '{ match = "blk.[0-1].*_exps*", importance = true, type = "q2_k" }, { match = "blk.*_exps*", type = "iq4_nl" }]'
    )
    chosen = ours(models("wide")[0], write(tmp_path, "\ufeff" + HEAD + rules))
    assert {kind for name, kind in chosen.items() if "_exps" in name} == {"iq4_nl"}


def test_unreadable_files_and_unknown_names(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b'description = "\xe9"')
    (tmp_path / "folder.toml").mkdir()
    for name, message in (
        (tmp_path / "absent.toml", "No such file"),
        (tmp_path / "folder.toml", "directory"),
        (tmp_path / "latin.toml", "UTF-8"),
        ("q4_kk", "unknown type 'q4_kk'; known: "),
        ("", "unknown type ''"),
    ):
        with pytest.raises(ArgumentError, match=re.escape(message)):
            recipes.load(name)


def test_types_that_need_importance_say_so(models, library):
    for kind in ("iq1_s", "iq2_xxs", "iq2_xs"):
        with pytest.raises(ArgumentError, match=f"recipe {kind}: type {kind} of tensor .* needs an importance matrix"):
            ours(models("wide")[0], kind)
