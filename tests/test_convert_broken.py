"""Broken checkpoints, a table of kinds: each is refused by one line of its own that names what is at fault, and leaves no file."""

import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import tiny_clover, tiny_qwen
from clover_convert.checkpoint import Checkpoint
from clover_convert.cli import main
from clover_convert.conversion import prepare, read
from clover_cpp.errors import CheckpointError
from clover_quant import recipes
from conftest import ROOT

NORM = "model.layers.1.input_layernorm.weight"
A_LOG = "model.layers.0.linear_attn.A_log"
EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"
EXPERTS = "model.layers.0.mlp.experts."
OUT = "model.layers.0.linear_attn.out_proj.weight"
GATE = "model.layers.0.mlp.gate.weight"
SCALE = OUT + "_scale_inv"
INDEX = "model.safetensors.index.json"
BLOCK = [32, 64]


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def save(found, path):
    save_file({name: tensor.contiguous().clone() for name, tensor in found.items()}, path)  # the old file may be mapped


def edit_tensors(folder, change):
    found = load_file(folder / "model.safetensors")
    change(found)
    save(found, folder / "model.safetensors")


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A folder with the sound checkpoints: qwen, clover, sharded, fp8."""
    folder = tmp_path_factory.mktemp("originals")
    tiny_qwen(folder / "qwen")
    tiny_clover(folder / "clover", block_size_head=True)
    model = tiny_qwen(folder / "sharded")
    (folder / "sharded" / "model.safetensors").unlink()
    model.save_pretrained(folder / "sharded", max_shard_size="300KB")
    shutil.copytree(folder / "qwen", folder / "fp8")
    edit_tensors(folder / "fp8", lambda t: t.update({OUT: t[OUT].to(torch.float8_e4m3fn), SCALE: torch.ones(2, 3)}))
    quantised = {"quant_method": "fp8", "weight_block_size": BLOCK}
    edit_json(folder / "fp8" / "config.json", lambda c: c.update(quantization_config=quantised))
    return folder


# Ways to damage: each gives a function of the folder.
def config(**fields):
    return edit_config(lambda c: c.update(fields))


def edit_config(change, name="config.json"):
    return lambda folder: edit_json(folder / name, change)


def rope(**fields):
    return edit_config(lambda c: c["rope_parameters"].update(fields))


def quantised(**fields):
    return config(quantization_config=fields)


def tensors(change):
    return lambda folder: edit_tensors(folder, change)


def one(name, change):
    """A tensor replaced by what `change` makes of it."""
    return tensors(lambda t: t.update({name: change(t[name])}))


def with_value(name, value):
    def change(found):
        found[name].view(-1)[1:3] = value

    return tensors(change)


def header(value, data=0):
    """A safetensors file of a header (bytes, or what becomes JSON) and so many bytes of data."""
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return content("model.safetensors", struct.pack("<Q", len(raw)) + raw + bytes(data))


def entry(**changes):
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


def content(name, data):
    return lambda folder: (folder / name).write_bytes(data)


def without(*names):
    return lambda folder: [(folder / name).unlink() for name in names]


def cut(name, kept):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:kept])


def longer(folder):
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"\0")


def shard(folder, number=2):
    return sorted(folder.glob("model-*.safetensors"))[number]


def index(change):
    return lambda folder: edit_json(folder / INDEX, lambda i: change(i["weight_map"], folder))


def link(name, target):
    def change(folder):
        (folder / name).unlink()
        (folder / name).symlink_to(target)

    return change


def fifo(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def pickle_under_the_name(folder):
    pickled(folder)
    (folder / "pytorch_model.bin").rename(folder / "model.safetensors")


def in_two_shards(folder):
    first, second = shard(folder, 0), shard(folder, 1)
    name, tensor = next(iter(load_file(first).items()))
    save({**load_file(second), name: tensor}, second)


def beside_the_index(folder):
    save({**load_file(shard(folder, 0)), "model.stray": torch.zeros(1)}, shard(folder, 0))


def fuse(experts, rows=192):
    """Experts of layer 0 as one tensor, with any number of experts and rows."""

    def change(found):
        for name in [name for name in found if name.startswith(EXPERTS) and "down" not in name]:
            del found[name]
        found[EXPERTS + "gate_up_proj"] = torch.zeros(experts, rows, 64)

    return tensors(change)


# kind -> (sound checkpoint, damage, what the error says: no other error of the table matches it)
BROKEN = {
    # files
    "no config": ("qwen", without("config.json"), r"no config\.json in"),
    "config is no JSON": ("qwen", content("config.json", b"{"), r"config\.json: not valid JSON \(Expecting property"),
    "config is no UTF-8": ("qwen", content("config.json", b"\xff\xfe"), r"config\.json: 'utf-8' codec"),
    "config is a list": ("qwen", content("config.json", b"[]"), r"config\.json: not a JSON object"),
    "config nested too deep": (
        "qwen", content("config.json", b'{"a":' * 100000), r"config\.json: not valid JSON \(maximum recursion",
    ),
    "a number of 5,000 digits": (
        "qwen", content("config.json", b'{"a":' + b"1" * 5000 + b"}"), r"config\.json: not valid.*4300 digits",
    ),
    "no weights": ("qwen", without("model.safetensors"), r"no model\.safetensors and no model\.safetensors\.index\.json in [^,]*$"),
    "pickles only": ("qwen", pickled, r"only pickles \(pytorch_model\.bin\), which can run code"),
    "a pickle named model.safetensors": ("qwen", pickle_under_the_name, r"not a safetensors file: (?!9223)\d+ bytes of header"),
    "Git LFS pointer": ("qwen", content("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), r"git lfs pull"),
    "a link to nowhere": ("qwen", link("model.safetensors", "absent"), r"model\.safetensors: No such file"),
    "a link to itself": ("qwen", link("model.safetensors", "model.safetensors"), r"Too many levels of symbolic links"),
    "a FIFO": ("qwen", fifo, r"model\.safetensors: not a regular file"),
    "no tokenizer": ("qwen", without("tokenizer.json"), r"no tokenizer\.json"),
    # one safetensors file
    "empty file": ("qwen", cut("model.safetensors", 0), r"truncated inside the header"),
    "cut in the data": ("qwen", cut("model.safetensors", -1), r"truncated: \d{6,} bytes, but the header describes \d{6,}$"),
    "a byte too many": ("qwen", longer, r"1 bytes follow the last tensor"),
    "header of 2^63 bytes": (
        "qwen", content("model.safetensors", struct.pack("<Q", 2**63) + b"{}"), r"file: 9223372036854775808 bytes",
    ),
    "header is no UTF-8": ("qwen", header(b"\xff\xff"), r"header is not valid JSON \('utf-8' codec"),
    "header is no JSON": ("qwen", header(b"{]"), r"header is not valid JSON \(Expecting property"),
    "header nested too deep": ("qwen", header(b'{"a":' * 100000), r"header is not valid JSON \(maximum recursion"),
    "header is a list": ("qwen", header(b"[1]"), r"header is not a JSON object"),
    "duplicate names": ("qwen", header(b'{"t":1,"u":1,"t":2}'), r"'t' occurs twice"),
    "entry is null": ("qwen", header({"nil": None}), r"'nil': malformed"),
    "no shape": ("qwen", header(entry(shape=None), 8), r"'t': malformed"),
    "unknown dtype": ("qwen", header(entry(dtype="F99"), 8), r"unknown dtype 'F99'"),
    "dtype is a list": ("qwen", header(entry(dtype=["F32"]), 8), r"unknown dtype \['F32'\]"),
    "shape and bytes differ": ("qwen", header(entry(shape=[3]), 8), r"8 bytes do not hold a F32 tensor of shape \[3\]"),
    "negative dimension": ("qwen", header(entry(shape=[-2], data_offsets=[8, 0]), 8), r"'t': shape and offsets must be whole"),
    "dimension of 2^64": ("qwen", header({"u": entry(shape=[2**64])["t"]}, 8), r"'u': shape and offsets must be whole"),
    "a fraction": ("qwen", header({"half": entry(shape=[2.5])["t"]}, 8), r"'half': shape and offsets must be whole"),
    "product overflows": ("qwen", header(entry(shape=[2**32, 2**32]), 8), r"do not hold.*\[4294967296, 4294967296\]"),
    "too many dimensions": ("qwen", header(entry(shape=[1] * 9, data_offsets=[0, 4]), 4), r"'t' has 9 dimensions"),
    "long name": ("qwen", header({"a" * 2000: entry()["t"]}, 8), r"name has 2000 characters"),
    "offsets out of range": (
        "qwen", header(entry(shape=[2000], data_offsets=[0, 8000]), 8), r"truncated: \d+ bytes, .* describes 80\d\d$",
    ),
    "a hole": ("qwen", header(entry(data_offsets=[8, 16]), 16), r"begins at byte 8 of the data, not at 0: a hole of 8 bytes"),
    "overlapping tensors": (
        "qwen", header({**entry(), "u": entry(data_offsets=[4, 12])["t"]}, 12), r"'u' begins .* an overlap of 4",
    ),
    # several files
    "index is no JSON": ("sharded", cut(INDEX, 100), r"index\.json: not valid JSON"),
    "no weight_map": ("sharded", edit_config(lambda i: i.pop("weight_map"), INDEX), r"'weight_map' must map"),
    "missing shard": (
        "sharded", lambda folder: shard(folder).unlink(), r"names the file 'model-00003-of-\d+\.safetensors', which is missing",
    ),
    "shard outside the folder": (
        "sharded", index(lambda m, _: m.update({NORM: "../qwen/model.safetensors"})), r"'\.\./qwen.*not a plain",
    ),
    "shard by absolute path": ("sharded", index(lambda m, _: m.update({NORM: "/etc/passwd"})), r"'/etc/passwd' is not a plain"),
    "shard's name with a NUL": ("sharded", index(lambda m, _: m.update({NORM: "a\nb\0"})), r"'a\\nb\\x00', which is missing"),
    "tensor in another shard": (
        "sharded", index(lambda m, folder: m.update({NORM: next(s for s in m.values() if s != m[NORM])})),
        r"which does not have it",
    ),
    "tensor in two shards": ("sharded", in_two_shards, r"stored twice: in model-00001\S+ and in model-00002"),
    "tensor beside the index": ("sharded", beside_the_index, r"does not name tensor 'model\.stray'"),
    # config.json
    "another model": ("qwen", config(model_type="llama"), r"unknown model_type 'llama'"),
    "model_type with a line break": ("qwen", config(model_type="a\nb" * 1000), r"unknown model_type 'a\\nb.*\.\.\."),
    "model_type is a list": ("qwen", config(model_type=["clover"]), r"unknown model_type \['clover'\]"),
    "a field is missing": ("qwen", edit_config(lambda c: c.pop("hidden_size")), r"'hidden_size' is missing"),
    "a field is a text": ("qwen", config(num_experts="8"), r"num_experts must be a whole number .* not '8'"),
    "a field is negative": ("qwen", config(head_dim=-32), r"head_dim must be .* not -32"),
    "more layers than the engine takes": (
        "qwen", config(num_hidden_layers=2**31 - 1, layer_types=None), r"num_hidden_layers must be .* to 512",
    ),
    "more experts than the engine takes": ("qwen", config(num_experts=513), r"num_experts must be .* not 513"),
    "epsilon beyond float32": ("qwen", config(rms_norm_eps=1e39), r"rms_norm_eps must be"),
    "theta of 400 digits": ("qwen", rope(rope_theta=10**400), r"rope_theta must be"),
    "other activation": ("qwen", config(hidden_act="gelu"), r"hidden_act 'gelu'"),
    "router not normalised": ("qwen", config(norm_topk_prob=False), r"norm_topk_prob False is not supported"),
    "no output gate": ("qwen", config(attn_output_gate=False), r"attn_output_gate False"),
    "tied is a text": ("qwen", config(tie_word_embeddings="false"), r"tie_word_embeddings must be true or false"),
    "convolution of one": ("qwen", config(linear_conv_kernel_dim=1), r"linear_conv_kernel_dim must be at least 2"),
    "context beyond reason": ("qwen", config(max_position_embeddings=2**30 + 1), r"max_position_embeddings must be"),
    "more rotary than there is": ("qwen", rope(partial_rotary_factor=1e38), r"partial_rotary_factor must be at most 1"),
    "no theta": ("qwen", edit_config(lambda c: c["rope_parameters"].pop("rope_theta")), r"'rope_theta' is missing"),
    "negative sections": ("qwen", rope(mrope_section=[9, -1, 0]), r"mrope_section must be three whole numbers"),
    "other rotary scaling": ("qwen", rope(rope_type="yarn"), r"rope_type 'yarn'"),
    "rotary sections in a row": ("qwen", rope(mrope_interleaved=False), r"mrope_interleaved False is not supported"),
    "sections do not fit": ("qwen", rope(mrope_section=[4, 3, 2]), r"mrope_section \[4, 3, 2\]"),
    "heads that do not divide": ("qwen", config(num_key_value_heads=3), r"num_attention_heads 4 is not a multiple"),
    "head sizes that differ": ("qwen", config(linear_value_head_dim=64), r"linear_value_head_dim 64 must be equal"),
    "too few layer types": ("qwen", config(layer_types=["linear_attention"] * 3), r"3 layer_types"),
    "unknown layer type": ("qwen", config(layer_types=["sliding_attention"] * 4), r"layer_types may only hold"),
    "more layers declared than stored": (
        "qwen", config(num_hidden_layers=5, layer_types=["linear_attention"] * 5), r"layer 4 is not stored",
    ),
    "more layers stored than declared": (
        "qwen", config(num_hidden_layers=3, layer_types=["linear_attention"] * 3), r"layer 3 is stored",
    ),
    "hidden size at odds": (
        "qwen", config(hidden_size=96), r"embed_tokens.* shape \[1024, 64\], config.json asks for \[1024, 96\]",
    ),
    "vocabulary at odds": (
        "qwen", config(vocab_size=2048), r"embed_tokens.* shape \[1024, 64\], config.json asks for \[2048, 64\]",
    ),
    "wrong expert count": (
        "qwen", config(num_experts=9), r"mlp\.gate\.weight' has shape \[8, 64\], config\.json asks for \[9, 64\]",
    ),
    "layer kinds exchanged": (
        "qwen", config(layer_types=["full_attention"] + ["linear_attention"] * 3),
        r"missing.*layers\.0\.self_attn.*unknown.*layers\.0\.linear_attn",
    ),
    "block sizes at odds": ("clover", config(block_sizes=[4, 8]), r"block_size_head.weight' has shape \[4, 64\]"),
    "block size beyond reason": ("clover", config(block_size=4097), r" block_size must be a whole number"),
    "threshold in percent": ("clover", config(confidence_threshold=95), r"confidence_threshold must be at most 1"),
    "shift_logits is a text": ("clover", config(shift_logits="yes"), r"shift_logits must be true or false"),
    "Clover declared as Qwen": ("clover", config(model_type="qwen3_5_moe_text"), r"^unknown in.*block_size_head\.weight"),
    "Qwen declared as Clover": (
        "qwen", config(model_type="clover", mask_token_id=1017), r"missing.*mem_gate\.weight, .*block_scale$",
    ),
    "GPTQ": ("qwen", quantised(quant_method="gptq", bits=4), r"quantization 'gptq'"),
    "AWQ": ("qwen", quantised(quant_method="awq"), r"quantization 'awq'"),
    "bitsandbytes": ("qwen", quantised(quant_method="bitsandbytes"), r"quantization 'bitsandbytes'"),
    "MXFP4": ("qwen", quantised(quant_method="mxfp4"), r"quantization 'mxfp4'"),
    "MLX's quantisation": ("qwen", config(quantization={"group_size": 64, "bits": 4}), r"quantization 'of MLX'"),
    "quantisation is a text": ("qwen", config(quantization_config="fp8"), r"quantization_config is not an object"),
    # tensors
    "missing tensor": ("qwen", tensors(lambda t: t.pop(NORM)), rf"missing from the checkpoint: {NORM}$"),
    "missing head": ("qwen", tensors(lambda t: t.pop("lm_head.weight")), r"missing from the checkpoint: lm_head\.weight$"),
    "missing expert": ("qwen", tensors(lambda t: t.pop(EXPERT)), rf"missing from the checkpoint: {EXPERT}$"),
    "missing half": (
        "clover", tensors(lambda t: t.pop("model.block_size_head.bias")), r"missing .*: model\.block_size_head\.bias$",
    ),
    "extra expert": (
        "qwen", tensors(lambda t: t.update({EXPERT.replace("5", "8"): torch.zeros(96, 64)})), r"^unknown in.*experts\.8\.up_proj",
    ),
    "unknown tensor": (
        "qwen", tensors(lambda t: t.update({"model.layers.0.mlp.extra": torch.zeros(1)})), r"kind: model\.layers\.0\.mlp\.extra$",
    ),
    "another model's names": (
        "qwen", tensors(lambda t: [t.update({"transformer.h." + name: t.pop(name)}) for name in list(t)]), r"layer 0 is not stored",
    ),
    "one tensor under two names": (
        "qwen", tensors(lambda t: t.update({NORM.replace("model.", "language_model.model."): t[NORM]})), r"same tensor under two",
    ),
    "experts twice": (
        "qwen", tensors(lambda t: t.update({EXPERTS + "down_proj": torch.zeros(8, 64, 96)})),
        r"experts\.\{0\.\.7\}\.down_proj\.weight$",
    ),
    "fused experts of another count": ("qwen", fuse(7), r"gate_up_proj' has shape \[7, 192, 64\]"),
    "fused experts of another size": ("qwen", fuse(8, 96), r"gate_up_proj' has shape \[8, 96, 64\]"),
    "transposed": ("qwen", one(OUT, lambda t: t.T), rf"{OUT}' has shape \[192, 64\]"),
    "flattened": ("qwen", one(OUT, lambda t: t.flatten()), rf"{OUT}' has shape \[12288\]"),
    "zero-size": ("qwen", one(OUT, lambda t: t[:0]), rf"{OUT}' has shape \[0, 192\]"),
    "no dimension": ("qwen", one(NORM, lambda t: t[0]), rf"{NORM}' has shape \[\]"),
    "integers": ("qwen", one(OUT, lambda t: t.long()), rf"{OUT}' is I64"),
    "truth values": ("qwen", one(OUT, lambda t: t > 0), rf"{OUT}' is BOOL"),
    "double precision": ("qwen", one(NORM, lambda t: t.double()), rf"{NORM}' is F64"),
    "the other FP8": ("qwen", one(OUT, lambda t: t.to(torch.float8_e5m2)), rf"{OUT}' is F8_E5M2"),
    "NaN": ("qwen", with_value(OUT, float("nan")), rf"{OUT}' has values that are not finite: 2 NaN, 0 inf"),
    "infinite": ("qwen", with_value(OUT, float("-inf")), rf"{OUT}' has values that are not finite: 0 NaN, 2 inf"),
    "NaN in a norm": ("qwen", with_value(NORM, float("nan")), rf"{NORM}' has values that are not finite"),
    "exponential beyond float32": ("qwen", with_value(A_LOG, 100), rf"{A_LOG}' has values too large"),
    "beyond the scales of q8_0": ("qwen", with_value(EXPERT, 1e9), rf"{EXPERT}': a value is too large, 1e\+09 is above .* of q8_0"),
    # FP8
    "FP8 without scales": ("fp8", tensors(lambda t: t.pop(SCALE)), rf"F8_E4M3 tensors without scales .*: {OUT}$"),
    "scale without a tensor": (
        "fp8", tensors(lambda t: t.update({NORM.replace("1", "7") + "_scale": torch.ones(1)})), r"scales without .*layers\.7",
    ),
    "scale of a float tensor": ("fp8", one(OUT, lambda t: t.float()), rf"scales without an F8_E4M3 tensor .*: {SCALE}$"),
    "two scales": ("fp8", tensors(lambda t: t.update({OUT + "_scale": torch.ones(1)})), rf"{OUT}' has two scales"),
    "scale of a wrong shape": ("fp8", one(SCALE, lambda t: t.T), rf"{SCALE}' has shape \[3, 2\], which does not fit \[64, 192\]"),
    "other blocks than declared": (
        "fp8", quantised(quant_method="fp8", weight_block_size=[64, 64]), r"does not fit \[64, 192\] in blocks of 64 x 64",
    ),
    "scale with another dtype": ("fp8", one(SCALE, lambda t: t.to(torch.float8_e8m0fnu)), rf"scale '{SCALE}' is F8_E8M0"),
    "scale is NaN": ("fp8", one(SCALE, lambda t: t * float("nan")), rf"{SCALE}' has 6 values .* as nan"),
    "scale is infinite": ("fp8", one(SCALE, lambda t: t / 0), rf"{SCALE}' has 6 values .* as inf"),
    "scale is negative": ("fp8", one(SCALE, lambda t: -t), rf"{SCALE}' has 6 values .* as -1"),
    "scale is zero": ("fp8", one(SCALE, lambda t: t * 0), rf"{SCALE}' has 6 values .* as 0"),
    "FP8 NaN": ("fp8", one(OUT, lambda t: torch.full_like(t.view(torch.uint8), 0x7F).view(t.dtype)), r"not finite: 12288 NaN"),
    "FP8 times scale beyond float32": (
        "fp8", tensors(lambda t: t.update({OUT: (t[OUT].float() * 0 + 448).to(t[OUT].dtype), SCALE: t[SCALE] * 3e38})),
        r"not finite: 0 NaN, 12288 inf",
    ),
    "FP8 of another format": ("fp8", quantised(quant_method="fp8", fmt="e5m2"), r"fmt 'e5m2'"),
    "blocks of three sizes": ("fp8", quantised(quant_method="fp8", weight_block_size=[1, 2, 3]), r"weight_block_size must be two"),
    "blocks of zero": (
        "fp8", quantised(quant_method="fp8", weight_block_size=[0, 128]), r"weight_block_size must be a whole number",
    ),
    # tokenizer
    "tokenizer is no JSON": ("qwen", cut("tokenizer.json", 1000), r"tokenizer\.json: not valid JSON"),
    "tokenizer without a model": ("qwen", edit_config(lambda t: t.pop("model"), "tokenizer.json"), r"tokenizer\.json is malformed"),
    "another kind of tokenizer": (
        "qwen", edit_config(lambda t: t["model"].update(type="Unigram"), "tokenizer.json"), r"model Unigram is not",
    ),
    "unknown pre-tokenizer": (
        "qwen", edit_config(lambda t: t.update(pre_tokenizer=None), "tokenizer.json"), r"unknown pre-tokenizer",
    ),
    "end token outside the vocabulary": ("qwen", config(eos_token_id=2000), r"eos_token_id 2000"),
    "mask tokens that differ": ("clover", config(mask_token_id=1016), r"mask_token_id is 1016 in config\.json, but 1017"),
}  # fmt: skip


def broken(originals, tmp_path, kind):
    """A copy of the checkpoint, damaged, and an empty folder for the output."""
    model, damage, _ = BROKEN[kind]
    folder = shutil.copytree(originals / model, tmp_path / model)
    (folder / "generation_config.json").unlink(missing_ok=True)  # names an end token too
    damage(folder)
    (tmp_path / "out").mkdir()
    return folder, tmp_path / "out" / "model.gguf"


def check(kind, code, out, err, output):
    assert code == 1 and not out, (code, out)
    assert err.count("\n") == 1 and err.startswith("clover-convert: error: "), err
    message = err.strip().removeprefix("clover-convert: error: ")
    assert [name for name, (*_, says) in BROKEN.items() if re.search(says, message)] == [kind], message
    assert len(message) < 2000
    assert not os.listdir(output.parent)


@pytest.fixture
def handlers():
    """The command sets signal handlers of its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_table_is_long_enough():
    assert len(BROKEN) >= 40


@pytest.mark.parametrize("kind", BROKEN)
def test_broken(originals, tmp_path, capsys, handlers, kind):
    folder, output = broken(originals, tmp_path, kind)
    with pytest.raises(SystemExit) as ended:
        main.main([str(folder), str(output)])
    check(kind, ended.value.code, *capsys.readouterr(), output)


@pytest.mark.parametrize("kind", ["header nested too deep", "FP8 times scale beyond float32", "infinite", "a FIFO"])
def test_broken_in_a_process_of_its_own(originals, tmp_path, kind):
    folder, output = broken(originals, tmp_path, kind)
    parts = os.pathsep.join(str(ROOT / part) for part in ("convert", "quant", "bindings"))
    command = [sys.executable, "-m", "clover_convert", folder, output]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": parts}, capture_output=True, text=True)
    check(kind, run.returncode, run.stdout, run.stderr, output)


@pytest.mark.parametrize("model", ["qwen", "clover", "sharded", "fp8"])
def test_undamaged(originals, tmp_path, handlers, model):
    with pytest.raises(SystemExit) as ended:
        main.main([str(originals / model), str(tmp_path / "model.gguf"), "--quiet"])
    assert ended.value.code == 0 and os.listdir(tmp_path) == ["model.gguf"]


def test_bfloat16_beyond_float16(originals, tmp_path, capsys, handlers):
    """Refused for f16 by the tensor's name, with the type that holds it."""
    folder = shutil.copytree(originals / "qwen", tmp_path / "qwen")
    edit_tensors(folder, lambda t: t.update({OUT: t[OUT].bfloat16().index_fill(1, torch.tensor(3), 70000.0)}))
    for kind, code in (("f16", 1), ("bf16", 0)):
        with pytest.raises(SystemExit) as ended:
            main.main([str(folder), str(tmp_path / "model.gguf"), "--outtype", kind, "--quiet"])
        assert ended.value.code == code
        if code:
            assert re.search(rf"{OUT}': a value is too large, 70144 is above 65504.*bf16", capsys.readouterr().err)
            assert os.listdir(tmp_path) == ["qwen"]


VALUES = '[null, true, 0, -1, 3, 4294967296, 1e999, 2.5, "", "a\\nb", "\\ud800", [], {}, [[1]], {"a": 1}]'


def damaged(rng, value):
    """A JSON value with a few random changes: entries deleted, copied, counted up, replaced."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randint(1, 3)):
        node, here = value, value
        while isinstance(here, (dict, list)) and here:
            node, key = here, rng.choice(list(here)) if isinstance(here, dict) else rng.randrange(len(here))
            here = node[key]
            if rng.random() < 0.3:
                break
        way = rng.randrange(4)
        if way == 0:
            del node[key]
        elif way == 1 and isinstance(node, dict):
            node[rng.choice([*node, "layers.0.x"])] = here
        elif way == 2 and type(here) is int:
            node[key] = here + rng.choice([-1, 1, 8])
        else:
            node[key] = rng.choice(json.loads(VALUES))
    return value


@pytest.mark.parametrize("part", ["config.json", "tokenizer_config.json", "header"])
def test_random_damage(originals, tmp_path, part):
    """Whatever is changed in the JSON parts: it is refused by one line, or can be planned."""
    folder = shutil.copytree(originals / "fp8", tmp_path / "fp8")
    raw = (folder / "model.safetensors").read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    sound = json.loads(raw[8:end] if part == "header" else (folder / part).read_text())
    refusals = 0
    for seed in range(80):
        text = json.dumps(damaged(random.Random(seed), sound)).encode()
        if part == "header":
            (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + raw[end:])
        else:
            (folder / part).write_bytes(text)
        try:
            with Checkpoint(folder) as checkpoint:
                prepare(read(checkpoint), recipes.load("q8_0"))
        except CheckpointError as error:
            refusals += 1
            assert "\n" not in str(error), seed
    assert refusals > 20
