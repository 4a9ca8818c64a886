"""The forms in which checkpoints come: each converts to the same bytes as the plain form of the same weights."""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from clover_convert import convert, fp8
from clover_convert.checkpoint import Checkpoint
from clover_convert.config import read_config
from clover_convert.folding import folded
from clover_convert.safetensors import SafetensorsFile
from clover_convert.tensors import plan, skipped
from clover_cpp.errors import CheckpointError
from conftest import ROOT

MATRICES = ("gate_proj", "up_proj", "down_proj")
EXPERT = re.compile(r"(.*\.mlp\.)experts\.(\d+)\.(\w+)\.weight")


def written(folder, tensors, name="model.safetensors"):
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / name)


@pytest.fixture
def same(tiny_checkpoints, tmp_path):
    """A function: two functions that edit a checkpoint's dicts of tensors and config.json; their results convert to equal bytes."""

    def check(model, *edits, type="f32"):
        outputs = []
        for number, edit in enumerate(edits):
            folder = tmp_path / str(number) / model
            shutil.copytree(tiny_checkpoints / model, folder)
            tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
            edit(tensors, config)
            written(folder, tensors)
            (folder / "config.json").write_text(json.dumps(config))
            outputs.append(tmp_path / f"{number}.gguf")
            convert(folder, outputs[-1], type=type)
        assert outputs[0].read_bytes() == outputs[1].read_bytes()

    return check


def unchanged(tensors, config):
    pass


def joined(tensors):
    """Take the experts out of a dict: name up to `mlp.` -> matrix -> tensor over all experts."""
    layers = {}
    for name in list(tensors):
        found = EXPERT.fullmatch(name)
        if found:
            layers.setdefault(found[1], {}).setdefault(found[3], {})[int(found[2])] = tensors.pop(name)
    return {
        at: {matrix: torch.stack([parts[i] for i in sorted(parts)]) for matrix, parts in matrices.items()}
        for at, matrices in layers.items()
    }


def stacked(tensors, config):
    for at, parts in joined(tensors).items():
        tensors.update({f"{at}experts.{matrix}": part for matrix, part in parts.items()})


def fused(tensors, config):
    for at, parts in joined(tensors).items():
        tensors[f"{at}experts.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        tensors[f"{at}experts.down_proj"] = parts["down_proj"]


def mlx(tensors, config):
    """As mlx-lm saves the model: stacked experts under another name, convolutions turned round, norms with the 1 added."""
    for at, parts in joined(tensors).items():
        tensors.update({f"{at}switch_mlp.{matrix}.weight": part for matrix, part in parts.items()})
    for name in list(tensors):
        if name.endswith("conv1d.weight"):
            tensors[name] = tensors[name].movedim(2, 1)
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensors[name] = tensors[name] + 1
        tensors["language_model." + name] = tensors.pop(name)


@pytest.mark.parametrize("model", ["qwen", "clover"])
@pytest.mark.parametrize("layout", [stacked, fused, mlx])
def test_layouts_of_the_experts(same, model, layout):
    same(model, unchanged, layout, type="q8_0")


def grid(tensor, block):
    """Indices of the scales of a tensor's elements: (rows, columns), for blocks of (rows, columns)."""
    return torch.arange(tensor.shape[-2]) // block[0], torch.arange(tensor.shape[-1]) // block[1]


def block_scales(tensor, block):
    shape = (*tensor.shape[:-2], *(-(-n // b) for n, b in zip(tensor.shape[-2:], block, strict=True)))
    return torch.rand(shape, generator=torch.Generator().manual_seed(tensor.numel())) / 100 + 0.001


def in_fp8(suffix, scales, block=None, dtype=torch.float32, layout=unchanged, keep="shared_expert"):
    """Two edits: projections in E4M3 with scales beside them, and the float32 values that those stand for.

    scales: function (tensor) -> (scales as stored, scales that broadcast over the tensor). Names with `keep` stay as they are.
    """

    def quantise(tensors):
        for name in list(tensors):
            if re.search(r"(proj|proj\.weight|in_proj_\w+\.weight)$", name) and keep not in name:
                stored, wide = scales(tensors[name])
                codes = (tensors.pop(name) / wide.float()).to(torch.float8_e4m3fn)
                yield name, codes, stored.to(dtype), codes.float() * wide.to(dtype).float()

    def stored(tensors, config):
        layout(tensors, config)
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        if block:
            config["quantization_config"]["weight_block_size"] = list(block)
        for name, codes, scale, _ in list(quantise(tensors)):
            tensors |= {name: codes, name + suffix: scale}

    def meant(tensors, config):
        layout(tensors, config)
        tensors |= {name: values for name, _, _, values in list(quantise(tensors))}

    return stored, meant


def per_block(block):
    def scales(tensor):
        stored = block_scales(tensor, block)
        rows, columns = grid(tensor, block)
        return stored, stored[..., rows, :][..., columns]

    return scales


def per_tensor(shape):
    return lambda tensor: (torch.full(shape, 0.01), torch.tensor(0.01))


def per_row(tensor):
    stored = torch.linspace(0.001, 0.01, tensor.shape[0] * (tensor.shape[1] if tensor.dim() == 3 else 1))
    stored = stored.reshape(*tensor.shape[:-1], 1)
    return stored, stored


def per_expert(tensor):
    stored = torch.linspace(0.001, 0.01, tensor.shape[0])
    return (stored, stored[:, None, None]) if tensor.dim() == 3 else (stored, stored[:, None])


FORMS = {
    "blocks": ("_scale_inv", per_block((32, 16)), (32, 16)),
    "ragged blocks": ("_scale_inv", per_block((40, 24)), (40, 24)),
    "blocks larger than the tensors": ("_scale_inv", per_block((128, 128)), None),
    "a number each": ("_scale", per_tensor(())),
    "a vector of one": ("_scale_inv", per_tensor((1,))),
    "rows": ("_scale", per_row),
    "a vector over the rows": ("_scale", per_expert),
    "blocks, bfloat16": ("_scale_inv", per_block((32, 32)), (32, 32), torch.bfloat16),
    "blocks, float16": ("_scale_inv", per_block((32, 32)), (32, 32), torch.float16),
    "fused experts in blocks": ("_scale_inv", per_block((24, 40)), (24, 40), torch.float32, fused),
    "fused experts by rows": ("_scale", per_row, None, torch.float32, fused),
    "stacked experts, a number each": ("_scale", per_expert, None, torch.float32, stacked),
    "MLX's names": ("_scale_inv", per_block((24, 40)), (24, 40), torch.float32, mlx),
}


@pytest.mark.parametrize("form", FORMS)
def test_fp8(same, form):
    same("qwen", *in_fp8(*FORMS[form]))


def test_fp8_of_a_clover_checkpoint_in_blocks_of_a_type(same):
    same("clover", *in_fp8(*FORMS["ragged blocks"]), type="q4_0")


def test_fp8_as_transformers_reads_it(tmp_path):
    codes = torch.arange(256, dtype=torch.uint8)[torch.randperm(64 * 96) % 256].reshape(64, 96).view(torch.float8_e4m3fn)
    scales = torch.rand(4, 3)
    written(tmp_path, {"t": codes, "t_scale_inv": scales})
    tensors = SafetensorsFile(tmp_path / "model.safetensors").tensors
    (tensor,) = fp8.scaled(tensors, (16, 32)).values()
    wanted = Fp8Dequantize(None)._dequantize_one(codes, scales)
    for first, end in ((0, 64), (3, 40), (63, 64), (5, 5)):
        np.testing.assert_array_equal(tensor.rows(first, end), wanted[first:end].numpy())


def test_every_e4m3_code_is_as_in_torch(tmp_path):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    written(tmp_path, {"t": codes})
    tensor = SafetensorsFile(tmp_path / "model.safetensors").tensors["t"]
    np.testing.assert_array_equal(tensor.rows(0, 256)[:, 0], codes.float().numpy())


def test_rows_from_many_threads(tiny_checkpoints):
    """The file position is nobody's: what a thread reads does not depend on the others."""
    with Checkpoint(tiny_checkpoints / "qwen") as checkpoint, concurrent.futures.ThreadPoolExecutor(8) as pool:
        wanted = load_file(tiny_checkpoints / "qwen" / "model.safetensors")
        tensors = [tensor for tensor in checkpoint.open_tensors().values() if len(tensor.shape) == 2] * 10
        for tensor, rows in zip(tensors, pool.map(lambda t: t.rows(1, t.shape[0]), tensors), strict=True):
            np.testing.assert_array_equal(rows, wanted[tensor.name][1:].numpy())


def test_what_is_skipped_is_said(same, tiny_checkpoints):
    def extra(tensors, config):
        config["num_nextn_predict_layers"] = 1
        config["mtp_num_hidden_layers"] = 0
        for name in ("model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight", "model.mtp.layers.0.mlp.gate.weight"):
            tensors[name] = torch.zeros(2, 2)
        tensors["model.visual.blocks.0.attn.proj.weight"] = torch.zeros(2, 2).to(torch.float8_e4m3fn)  # with no scale
        tensors["model.layers.4.eh_proj.weight"] = torch.zeros(64, 128)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["model.layers.3.self_attn.q_proj.input_scale"] = torch.ones(())
        tensors["model.layers.3.self_attn.o_proj.activation_scale"] = torch.ones(())
        tensors["model.layers.3.self_attn.k_scale"] = torch.ones(())
        names.update(tensors)
        fields.update(config)

    names, fields = {}, {}
    same("qwen", unchanged, extra)
    said = dict(re.fullmatch(r"(.*) \((\d+) tensors\)", line).groups() for line in skipped(names, read_config(fields)))
    assert {what.split()[1]: int(count) for what, count in said.items()} == {
        "vision": 2, "multi-token-prediction": 3, "frequencies": 1, "of": 3,
    }  # fmt: skip
    with Checkpoint(tiny_checkpoints / "qwen") as checkpoint:
        assert skipped(checkpoint.open_tensors(), read_config(checkpoint.config)) == []


def test_mtp_layers_that_are_not_declared_are_no_mtp_layers(tiny_checkpoints):
    with Checkpoint(tiny_checkpoints / "qwen") as checkpoint:
        tensors = dict(checkpoint.open_tensors())
        tensors["model.layers.4.eh_proj.weight"] = tensors["model.norm.weight"]
        with pytest.raises(CheckpointError, match="layer 4 is stored"):
            plan(tensors, read_config(checkpoint.config))


def renamed(tensors, name, new):
    tensors[new] = dataclasses.replace(tensors.pop(name), name=new)


def test_all_names_are_listed(tiny_checkpoints):
    """What is unknown and what is missing comes in one message, shortened but complete."""
    with Checkpoint(tiny_checkpoints / "qwen") as checkpoint:
        tensors = dict(checkpoint.open_tensors())
        config = read_config(checkpoint.config)
    for layer in range(4):
        for expert in range(8):
            name = f"model.layers.{layer}.mlp.experts.{expert}."
            renamed(tensors, f"{name}up_proj.weight", f"{name}extra")
    renamed(tensors, "model.norm.weight", "a.b")
    with pytest.raises(CheckpointError) as caught:
        plan(tensors, config)
    assert str(caught.value) == (
        "missing from the checkpoint: model.norm.weight, model.layers.{0..3}.mlp.experts.{0..7}.up_proj.weight;"
        " unknown in a checkpoint of this kind: model.layers.{0..3}.mlp.experts.{0..7}.extra, a.b"
    )


def unfolded(text):
    """The names that a folded list stands for."""
    names = []
    for item in re.findall(r"(?:[^,{]|{[^}]*})+", text):
        parts = [""]
        for literal, places in re.findall(r"([^{]*)(?:{([^}]*)})?", item.strip()):
            values = [""]
            if places:
                ends = [(run.split("..")[0], run.split("..")[-1]) for run in places.split(",")]
                values = [str(n) for first, last in ends for n in range(int(first), int(last) + 1)]
            parts = [part + literal + value for part in parts for value in values]
        names += parts
    return names


@pytest.mark.parametrize("seed", range(20))
def test_folded_names_lose_and_add_none(seed):
    rng = np.random.default_rng(seed)
    names = [f"layers.{a}.experts.{b}.w{c}" for a, b, c in rng.integers(0, (6, 5, 2), (60, 3)).tolist()]
    names += [f"layers.{a}.norm" for a in rng.integers(0, 9, 5).tolist()] + ["head", "layers.07.x", "5", "blk5.6"]
    text = folded(names)
    assert sorted(unfolded(text)) == sorted(set(names))
    assert len(text) < sum(map(len, names))


def test_fingerprint(tiny_checkpoints, tmp_path):
    """It changes with config.json, a header, a size or the time of the last change, and only then."""

    def fingerprint():
        with Checkpoint(tmp_path / "qwen") as checkpoint:
            checkpoint.open_tensors()
            return checkpoint.fingerprint()

    shutil.copytree(tiny_checkpoints / "qwen", tmp_path / "qwen")
    model, config = tmp_path / "qwen" / "model.safetensors", tmp_path / "qwen" / "config.json"
    seen = [fingerprint()]
    assert fingerprint() == seen[0]
    os.utime(model, ns=(0, 0))
    seen.append(fingerprint())
    written(tmp_path / "qwen", {name + "x": tensor for name, tensor in load_file(model).items()})
    os.utime(model, ns=(0, 0))
    seen.append(fingerprint())
    config.write_text(config.read_text().replace("1016", "1015"))
    seen.append(fingerprint())
    assert len(set(seen)) == len(seen)


def cached(tiny_checkpoints, home, revision="main"):
    """A cache of huggingface_hub with the repository org/Tiny: files in `blobs`, links to them in a snapshot."""
    repo = home / "hub" / "models--org--Tiny"
    commit = hashlib.sha1(revision.encode()).hexdigest()
    snapshot = repo / "snapshots" / commit
    for folder in (repo / "blobs", repo / "refs", snapshot):
        folder.mkdir(parents=True)
    (repo / "refs" / revision).write_text(commit)
    for path in (tiny_checkpoints / "qwen").iterdir():
        blob = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, repo / "blobs" / blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
    return commit


def offline(home, folder, *arguments):
    """clover-convert in `folder` with a cache and no network."""
    parts = os.pathsep.join(str(ROOT / part) for part in ("convert", "quant", "bindings"))
    variables = {"PYTHONPATH": parts, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(home / "hub")}
    command = [sys.executable, "-m", "clover_convert", *arguments, "--quiet"]
    return subprocess.run(command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True)


@pytest.mark.parametrize("revision", ["main", "v1"])
def test_repo_id(tiny_checkpoints, tmp_path, revision):
    commit = cached(tiny_checkpoints, tmp_path / "home", revision)
    source = "org/Tiny" if revision == "main" else f"org/Tiny@{revision}"
    run = offline(tmp_path / "home", tmp_path, source, "hub.gguf")
    assert run.returncode == 0, run.stderr
    shutil.copytree(tiny_checkpoints / "qwen", tmp_path / "Tiny")
    convert(tmp_path / "Tiny", tmp_path / "folder.gguf")
    assert (tmp_path / "hub.gguf").read_bytes() == (tmp_path / "folder.gguf").read_bytes()
    assert gguf.GGUFReader(tmp_path / "hub.gguf").get_field("general.name").contents() == "Tiny"
    run = offline(tmp_path / "home", tmp_path, f"org/Tiny@{commit}", "commit.gguf")
    assert run.returncode == 0, run.stderr


def test_a_folder_goes_before_a_repo_id(tiny_checkpoints, tmp_path):
    cached(tiny_checkpoints, tmp_path / "home")
    (tmp_path / "org" / "Tiny").mkdir(parents=True)
    run = offline(tmp_path / "home", tmp_path, "org/Tiny", "out.gguf")
    assert run.returncode == 1 and "no config.json in org/Tiny" in run.stderr


@pytest.mark.parametrize("source", ["org/Absent", "org/Tiny@v9", "org/a--b"])
def test_neither_folder_nor_repo(tiny_checkpoints, tmp_path, source):
    cached(tiny_checkpoints, tmp_path / "home")
    run = offline(tmp_path / "home", tmp_path, source, "out.gguf")
    assert run.returncode == 1 and run.stderr.count("\n") == 1, run.stderr
    assert f"error: {source}: no such folder, and as a repository: " in run.stderr
    assert sorted(os.listdir(tmp_path)) == ["home"]


@pytest.mark.parametrize(
    "source", ["absent", "./org/Absent", "/org/Absent", "org/Absent/more", "org/Absent@a b", "-x/y", "a\0/b", ""]
)
def test_no_folder_and_no_repo_id(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder, and it is not a repo id|not a folder|null byte|no config.json"):
        convert(source, "out.gguf")
    assert not os.listdir(tmp_path)
