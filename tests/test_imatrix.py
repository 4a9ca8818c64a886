"""Importance matrices: sums against the inputs that PyTorch's modules see, files against the gguf package and llama-quantize."""

import contextlib
import shutil
import subprocess
import sys
import warnings

import gguf
import model_files
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from checkpoints import tiny_clover
from clover_convert import convert
from clover_cpp import ArgumentError, Clover, EngineError, Importance, ModelFileError, UnsupportedError, ggml
from clover_quant.collection import collect
from clover_quant.imatrix import Imatrix
from clover_quant.passes import Walk
from conftest import CONVERTER, ROOT

pytestmark = pytest.mark.usefixtures("library")

EXACT = {"n_ctx": 512, "n_threads": 1, "kv_type": "f32", "flash_attn": "off"}
LINEAR = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_mem_gate": "linear_attn.mem_gate", "ssm_out": "linear_attn.out_proj",
}  # fmt: skip
FULL = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj"}
BOTH = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip


class Reference:
    """Sums of squared inputs and counts, by GGUF name, of what the reference's modules are called with."""

    def __init__(self, model):
        self.found, self.hooks = {}, []
        for i, layer in enumerate(model.model.layers):
            for name, path in {**(LINEAR if layer.is_linear else FULL), **BOTH}.items():
                self._hook(
                    layer.get_submodule(path), lambda inputs, name=f"blk.{i}.{name}.weight": self._add(name, inputs[0][None])
                )
            self._hook(layer.mlp.experts, lambda inputs, i=i, experts=layer.mlp.experts: self._add_experts(i, experts, *inputs))

    def _hook(self, module, function):
        self.hooks.append(module.register_forward_pre_hook(lambda _, inputs: function(inputs)))

    def _add(self, name, matrices):
        sums = np.stack([rows.double().square().sum(0).numpy() for rows in matrices])
        counts = np.array([len(rows) for rows in matrices])
        old = self.found.get(name, (0, 0))
        self.found[name] = old[0] + sums, old[1] + counts

    def _add_experts(self, i, experts, x, weights):
        chosen = [x[weights[:, e] > 0] for e in range(weights.shape[1])]
        inner = []
        for rows, matrix in zip(chosen, experts.gate_up_proj, strict=True):
            gate, up = F.linear(rows, matrix).chunk(2, dim=-1)
            inner.append(F.silu(gate) * up)
        for name, rows in ("gate", chosen), ("up", chosen), ("down", inner):
            self._add(f"blk.{i}.ffn_{name}_exps.weight", rows)

    def expected(self, config):
        """What was found, with the columns of ssm_out in llama.cpp's order of value heads: by key head's place, then key head."""
        n_k, n_v, d = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
        for name, (sums, counts) in self.found.items():
            if name.endswith("ssm_out.weight"):
                sums = sums.reshape(n_k, n_v // n_k, d).swapaxes(0, 1).reshape(1, -1)
            yield name, sums, counts

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()


@torch.no_grad()
def reference_of(model, passes):
    """name -> (sums, counts) of the reference that runs passes: (kind, tokens), or None for an empty context."""
    with Reference(model) as reference:
        for each in passes:
            if each is None:
                state = model.new_state()
            else:
                model.hidden(torch.tensor(each[1]), state, causal=each[0] == "causal")
    return {name: (sums, counts) for name, sums, counts in reference.expected(model.config)}


def draw(seed, n):
    return np.random.default_rng(seed).integers(0, 1000, n).tolist()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    return path


def test_sums_of_causal_and_block_passes_equal_the_references():
    path, model = model_files.clover()
    block = [model.config.mask_token_id if i % 3 else token for i, token in enumerate(draw(2, 32))]
    passes = [("causal", draw(1, 100)), ("block", block), ("causal", draw(3, 5)), ("block", block[:7])]
    importance = Importance()
    with Clover(path, importance=importance, **EXACT) as clover:
        for kind, tokens in passes:
            clover.evaluate(tokens, kind)
        importance.paused = True
        clover.evaluate(draw(4, 9))
    found, expected = importance.entries(), reference_of(model, [None, *passes])
    assert found.keys() == expected.keys()
    for name, (sums, counts) in expected.items():
        assert np.array_equal(found[name][1], counts), name
        assert np.allclose(found[name][0], sums, rtol=1e-3, atol=1e-5 * sums.max()), name


def test_generation_is_gathered_from_too():
    path, model = model_files.clover()
    importance = Importance()
    with Clover(path, importance=importance, **EXACT) as clover:
        list(clover.generate(draw(1, 20), "ar", max_tokens=4))
        passes = [("causal", clover.tokens[:20]), *[("causal", [token]) for token in clover.tokens[20:23]]]
    found = importance.entries()
    for name, (_, counts) in reference_of(model, [None, *passes]).items():
        assert np.array_equal(found[name][1], counts), name


@pytest.mark.parametrize("mode", ["causal", "both"])
def test_collecting_from_a_text(mode, text):
    path, model = model_files.clover()
    found = collect(path, text, context=80, count=3, mode=mode, ratios=(1.0, 0.5), threads=1)
    with Clover(path, **EXACT) as clover:
        tokens, info = clover.tokenize(text.read_text(encoding="utf-8")), clover.info
    passes, walk = [], Walk(info, "both", (1.0, 0.5))
    for start in (0, 80, 160):
        chunk = tokens[start : start + 80]
        passes.append(None)
        passes += [("causal", chunk)] if mode == "causal" else [(each.kind, each.tokens) for each in walk(chunk)]
    assert found.counts["blk.0.attn_qkv.weight"] == [240 if mode == "causal" else 384]
    for name, (sums, counts) in reference_of(model, passes).items():  # keys are float16: an expert may be chosen otherwise
        assert np.abs(found.counts[name] - counts).sum() <= 0.01 * counts.sum() + 2, name
        assert np.allclose(found.sums[name].sum(), sums.sum(), rtol=2e-2), name


def test_only_block_passes_count(text):
    path, _ = model_files.clover()
    found = collect(path, text, context=80, count=2, mode="block", threads=1)
    assert found.counts["blk.0.attn_qkv.weight"] == [2 * 48]
    assert "blk.0.ssm_alpha.weight" not in found.sums  # the block pass has no use for it


def test_masks_are_of_the_given_ratios_and_repeatable():
    path, _ = model_files.clover()
    with Clover(path, **EXACT) as clover:
        info = clover.info
    chunk = draw(1, 32 * 5 + 3)
    walks = [list(Walk(info, "both", (1.0, 0.25), seed)(chunk)) for seed in (1, 1, 2)]
    assert walks[0] == walks[1] != walks[2]
    blocks = [each for each in walks[0] if each.kind == "block"]
    assert [len(each.masked) for each in blocks] == [32, 8, 32, 8, 3]
    assert [token for each in walks[0] if each.kind == "causal" for token in each.tokens] == chunk
    for each, start in zip(blocks, range(32, len(chunk), 32), strict=True):
        assert [i for i, token in enumerate(each.tokens) if token == info.mask_token] == list(each.masked)
        kept = [i for i in range(len(each.tokens)) if i not in each.masked]
        assert [each.tokens[i] for i in kept] == [chunk[start + i] for i in kept]


def test_the_file_is_llama_cpps(tmp_path, bundled_gguf, text):
    output = tmp_path / "imatrix.gguf"
    command = [sys.executable, "-m", "clover_quant", "imatrix", bundled_gguf("f32"), text, "-o", output, "--context", "64"]
    done = subprocess.run([*command, "--chunks", "4"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reader = gguf.GGUFReader(output)
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == [str(text)]
    assert (reader.fields["imatrix.chunk_count"].contents(), reader.fields["imatrix.chunk_size"].contents()) == (4, 64)
    names = {tensor.name for tensor in reader.tensors}
    entries = len(names) // 2
    quantize = ROOT / "build" / "bin" / "llama-quantize"
    command = [quantize, "--imatrix", output, bundled_gguf("f32"), tmp_path / "quantised.gguf", "IQ3_S"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"loaded {entries} importance matrix entries from {output} computed on 4 chunks" in done.stdout + done.stderr
    keys = gguf.GGUFReader(tmp_path / "quantised.gguf").fields
    assert keys["quantize.imatrix.entries_count"].contents() == entries
    matrix = Imatrix.load(output)
    for tensor in gguf.GGUFReader(bundled_gguf("f32")).tensors:
        shape = [int(n) for n in reversed(tensor.shape)]
        if f"{tensor.name}.in_sum2" in names:
            values = matrix.importance(tensor.name, shape)
            assert values.dtype == np.float32 and values.shape == (shape[0] if len(shape) == 3 else 1, shape[-1])
            assert (values >= 0).all() and values.any()
        elif len(shape) > 1 and tensor.name.startswith("blk."):
            assert tensor.name.endswith("ssm_conv1d.weight"), tensor.name


def write(path, keys=(), **tensors):
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    for key, kind, value in keys:
        getattr(writer, f"add_{kind}")(key, value)
    for name, data in tensors.items():
        writer.add_tensor(name.replace("__", "."), np.asarray(data, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_importance_is_the_mean_and_one_where_nothing_was_seen(tmp_path):
    path = write(tmp_path / "i.gguf", w__in_sum2=[[2, 4], [0, 0], [9, 3]], w__counts=[[2], [0], [3]])
    found = Imatrix.load(path).importance("w", (3, 5, 2))
    assert found.tolist() == [[1, 2], [1, 1], [3, 1]]
    assert Imatrix.load(path).importance("other", (3, 5, 2)) is None
    for shape in ((3, 5, 4), (5, 2), (2, 5, 2)):
        with pytest.raises(ArgumentError, match="w is"):
            Imatrix.load(path).importance("w", shape)


def test_a_matrix_saved_and_loaded_is_the_same_and_a_failed_write_leaves_nothing(tmp_path, text):
    found = collect(model_files.clover()[0], text, context=64, count=1, threads=1)
    found.save(tmp_path / "a.gguf", 64)
    loaded = Imatrix.load(tmp_path / "a.gguf")
    assert loaded.sums.keys() == found.sums.keys()
    for name, sums in found.sums.items():
        assert np.array_equal(loaded.sums[name], sums) and np.array_equal(loaded.counts[name].ravel(), found.counts[name])
    (tmp_path / "folder").mkdir()
    for target in tmp_path / "folder", tmp_path / "missing" / "a.gguf":
        with pytest.raises(ArgumentError):
            found.save(target, 64)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gguf", "folder", "text.txt"]


def test_damaged_files_give_one_error(tmp_path):
    good = write(tmp_path / "good.gguf", w__in_sum2=np.ones((3, 64)), w__counts=np.ones((3, 1))).read_bytes()
    path = tmp_path / "bad.gguf"
    cases = {
        "old format": (b"\x02\0\0\0rest", "dat"),
        "empty": (b"", "not an importance matrix"),
        "header only": (good[:24], "damaged"),
        "cut": (good[: len(good) - 700], "damaged"),
    }
    for what, (data, message) in cases.items():
        path.write_bytes(data)
        with pytest.raises(ArgumentError, match=message):
            print(what, Imatrix.load(path))
    for tensors in (
        {"w__in_sum2": [[1, 2]]},
        {"w__in_sum2": [[1, 2]], "w__counts": [[1], [1]]},
        {"w__in_sum2": [[1, np.nan]], "w__counts": [[1]]},
        {"w__in_sum2": [[1, -1]], "w__counts": [[1]]},
        {"w__other": [[1, -1]]},
        {"w__in_sum2": [[1, 3e38]], "w__counts": [[1]]},
        {"w__in_sum2": [[1, 1]], "w__counts": [[1e-38]]},
        {"w__in_sum2": [[1, 3e38]], "w__counts": [[1e-38]]},
        {},
    ):
        with warnings.catch_warnings(), pytest.raises(ArgumentError):
            warnings.simplefilter("error")
            Imatrix.load(write(path, **tensors))
    for key in (
        ("imatrix.chunk_count", "int32", -1),
        ("imatrix.chunk_count", "uint64", 2**32),
        ("imatrix.chunk_count", "string", "3"),
        ("imatrix.datasets", "string", "text"),
        ("imatrix.datasets", "array", [1, 2]),
    ):
        with pytest.raises(ArgumentError, match=key[0]):
            Imatrix.load(write(path, [key], w__in_sum2=[[1, 2]], w__counts=[[1]]))
    random = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(good)
        for i in random.integers(0, len(good) - 800, 3):
            damaged[i] = random.integers(256)
        path.write_bytes(damaged)
        with contextlib.suppress(ArgumentError):
            Imatrix.load(path).importance("w", (3, 5, 64))
    with pytest.raises(ArgumentError, match="missing"):
        Imatrix.load(tmp_path / "missing.gguf")


def test_wrong_texts_modes_and_models(tmp_path, text):
    path, _ = model_files.clover()
    (tmp_path / "short").write_text("a b c")
    (tmp_path / "latin").write_bytes(b"caf\xe9 " * 1000)
    for given, message in ((tmp_path / "short", "too few"), (tmp_path / "latin", "UTF-8"), (tmp_path / "none", "No such file")):
        with pytest.raises(ArgumentError, match=message):
            collect(path, given, threads=1)
    for ratios in ((), (0,), (1.5,)):
        with pytest.raises(ArgumentError, match="ratios"):
            collect(path, text, ratios=ratios, threads=1)
    with pytest.raises(ArgumentError, match="longer than the model's"):
        collect(path, text, context=100_000, threads=1)
    with pytest.raises(UnsupportedError, match="block"):
        collect(model_files.qwen(), text, threads=1)
    assert collect(model_files.qwen(), text, context=64, count=1, mode="causal", threads=1).counts["blk.0.attn_qkv.weight"] == [64]


def test_one_collector_is_of_one_model(bundled_gguf):
    importance = Importance()
    with Clover(model_files.clover()[0], importance=importance, **EXACT) as clover:
        clover.evaluate(draw(1, 5))
    with Clover(bundled_gguf("f32"), importance=importance, **EXACT) as clover:
        with pytest.raises(EngineError, match="another model"):
            clover.evaluate(draw(1, 5))
        assert clover.tokens == []


def command(module, *arguments):
    return subprocess.run([sys.executable, "-m", module, *map(str, arguments)], env=CONVERTER, capture_output=True, text=True)


def test_a_matrix_that_would_be_empty_is_not_written(tmp_path, text):
    path = model_files.clover()[0]
    with pytest.raises(ArgumentError, match="context of 32 tokens has no block passes"):
        collect(path, text, context=32, mode="block", threads=1)
    done = command("clover_quant", "imatrix", path, text, "-o", tmp_path / "i.gguf", "--mode", "block", "--context", "32")
    assert done.returncode == 1 and "no block passes" in done.stderr and not (tmp_path / "i.gguf").exists()


def test_the_output_is_looked_at_before_the_work(tmp_path, text):
    model = shutil.copy(model_files.clover()[0], tmp_path / "model.gguf")
    before = {path: path.read_bytes() for path in (model, text)}
    (tmp_path / "link").symlink_to(text)
    for output, message in (
        (model, "it is the input"),
        (text, "it is the input"),
        (tmp_path / "link", "it is the input"),
        (tmp_path, "is a folder"),
        (tmp_path / "absent" / "i.gguf", "no folder"),
    ):
        done = command("clover_quant", "imatrix", model, text, "-o", output, "--context", "10000000")  # too long, said later
        assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1
    assert {path: path.read_bytes() for path in before} == before


def test_the_converter_wants_a_matrix_of_this_model(tmp_path):
    folder, output = tmp_path / "m", tmp_path / "out.gguf"
    tiny_clover(folder)
    other = write(tmp_path / "other.gguf", w__in_sum2=np.ones((1, 64)), w__counts=[[1]])
    with pytest.raises(ArgumentError, match="other.gguf: none of its entries is of a tensor of this model"):
        convert(folder, output, "q4_0", imatrix=Imatrix.load(other))
    n = 64
    some = write(
        tmp_path / "some.gguf",
        **{"blk__0__attn_gate__weight__in_sum2": np.ones((1, n)), "blk__0__attn_gate__weight__counts": [[1]]},
    )
    done = command("clover_convert", folder, output, "--outtype", "q4_0", "--imatrix", some)
    assert done.returncode == 0 and "the importance matrix has nothing of " in done.stderr, done.stderr
    before = some.read_bytes()
    done = command("clover_convert", folder, some, "--outtype", "q4_0", "--imatrix", some)
    assert done.returncode == 1 and "it is the input" in done.stderr and some.read_bytes() == before
    recipe = tmp_path / "mine.toml"
    recipe.write_text('description = ""\nfile_type = "Q8_0"\ndefault = "q8_0"\n')
    done = command("clover_convert", folder, recipe, "--outtype", recipe)
    assert done.returncode == 1 and "it is the input" in done.stderr and "description" in recipe.read_text()
    shard = shutil.copy(some, tmp_path / "s-00001-of-00002.gguf")
    dry = command("clover_convert", folder, tmp_path / "s.gguf", "--outtype", "q4_0", "--split-max-size", "100K", "--dry-run")
    count = int(dry.stdout.split()[-2])
    shard = shard.rename(tmp_path / f"s-{1:05d}-of-{count:05d}.gguf")
    done = command(
        "clover_convert", folder, tmp_path / "s.gguf", "--outtype", "q4_0", "--split-max-size", "100K", "--imatrix", shard
    )
    assert done.returncode == 1 and "it is the input" in done.stderr and shard.read_bytes() == before


@pytest.mark.parametrize("type", ["q4_0", "q4_k", "q2_k", "q3_k", "q6_k", "iq3_s", "iq4_xs", "iq2_xs"])
@pytest.mark.parametrize("mean", [1e-38, 1e20])
def test_the_smallest_and_the_largest_importance_give_finite_weights(type, mean):
    random = np.random.default_rng(0)
    rows = random.standard_normal((4, 256)).astype(np.float32) * 1000
    kind = ggml.types()[type]
    found = ggml.dequantize(kind, ggml.quantize(kind, rows, np.full(256, mean, np.float32)), 256)
    assert np.isfinite(found).all()
    if mean > 1:
        assert np.abs(found - rows).max() < np.abs(rows).max()


def test_later_files_of_a_split_model_are_told_apart(tmp_path, text, library):
    tiny_clover(tmp_path / "m")
    convert(tmp_path / "m", tmp_path / "s.gguf", "q8_0", split_max_size=500_000)
    first, second, *_ = sorted(tmp_path.glob("s-*.gguf"))
    with pytest.raises(ModelFileError, match="a later file of several"):
        collect(second, text, threads=1)
    assert collect(first, text, context=64, count=1, threads=1).sums
