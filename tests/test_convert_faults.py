"""Bad input to clover-convert: one clear error each, no output file, an older output untouched, memory that does not grow."""

import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import tiny_clover, tiny_qwen
from clover_convert import convert
from clover_cpp.errors import ArgumentError, CheckpointError, ResourceError
from conftest import ROOT

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("convert", "quant", "bindings"))}


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    tiny_qwen(folder / "qwen")
    tiny_clover(folder / "clover", block_size_head=True)
    model = tiny_qwen(folder / "sharded")
    (folder / "sharded" / "model.safetensors").unlink()
    model.save_pretrained(folder / "sharded", max_shard_size="300KB")
    return folder


@pytest.fixture
def use(originals, tmp_path):
    """A function: name of an original checkpoint -> a copy to damage."""
    return lambda name: shutil.copytree(originals / name, tmp_path / name)


def refused(folder, message, type="q8_0"):
    """Conversion fails with this message on one line, and leaves the output's folder as it was."""
    output = folder.parent / "out" / "model.gguf"
    output.parent.mkdir(exist_ok=True)
    output.write_bytes(b"older")
    with pytest.raises(CheckpointError) as caught:
        convert(folder, output, type=type)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert os.listdir(output.parent) == ["model.gguf"] and output.read_bytes() == b"older"


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")


# config.json -> what the error names
CONFIGS = [
    (lambda c: c.update(model_type="llama"), "unknown model_type 'llama'"),
    (lambda c: c.pop("model_type"), "unknown model_type None"),
    (lambda c: c.pop("hidden_size"), "'hidden_size' is missing"),
    (lambda c: c.update(num_experts="8"), "num_experts must be a whole number"),
    (lambda c: c.update(head_dim=-32), "head_dim"),
    (lambda c: c.update(num_key_value_heads=3), "num_attention_heads 4 is not a multiple"),
    (lambda c: c.update(linear_value_head_dim=64), "must be equal"),
    (lambda c: c.update(rms_norm_eps=0), "rms_norm_eps"),
    (lambda c: c.update(rms_norm_eps=1e39), r"rms_norm_eps.*float32.*1e\+39"),
    (lambda c: c.update(rms_norm_eps=1e-60), "rms_norm_eps.*float32.*1e-60"),
    (lambda c: c.update(rms_norm_eps=float("nan")), "rms_norm_eps.*nan"),
    (lambda c: c.update(model_type=["clover"]), r"unknown model_type \['clover'\]"),
    (lambda c: c.update(model_type={}), r"unknown model_type {}"),
    (lambda c: c.update(model_type="a\nb" * 1000), r"unknown model_type 'a\\nb.*\.\.\."),
    (lambda c: c.update(tie_word_embeddings="false"), "tie_word_embeddings must be true or false"),
    (lambda c: c.update(vocab_size=2**31 - 1), "vocab_size must be a whole number from 1 to 1048576"),
    (lambda c: c.update(vocab_size=2**20), r"shape \[1024, 64\], config.json asks for \[1048576, 64\]"),
    (lambda c: c.update(num_hidden_layers=2**31 - 1, layer_types=None), "num_hidden_layers must be a whole number from 1 to 512"),
    (lambda c: c.update(num_experts=513), "num_experts must be a whole number from 1 to 512"),
    (lambda c: c.update(max_position_embeddings=2**30 + 1), "max_position_embeddings must be a whole number from 1 to"),
    (lambda c: c.update(linear_conv_kernel_dim=1), "linear_conv_kernel_dim must be at least 2"),
    (lambda c: c["rope_parameters"].update(rope_theta=10**400), "rope_theta.*float32"),
    (lambda c: c["rope_parameters"].update(rope_theta=1e39), "rope_theta.*float32"),
    (lambda c: c["rope_parameters"].update(partial_rotary_factor=1e38), "partial_rotary_factor must be at most 1"),
    (lambda c: c["rope_parameters"].update(mrope_section=[9, -1, 0]), "mrope_section must be three whole numbers"),
    (lambda c: c.update(hidden_act="gelu"), "hidden_act 'gelu'"),
    (lambda c: c.update(attn_output_gate=False), "attn_output_gate"),
    (lambda c: c.update(layer_types=["linear_attention"] * 3), "3 layer_types"),
    (lambda c: c.update(layer_types=["sliding_attention"] * 4), "layer_types may only hold"),
    (lambda c: c["rope_parameters"].update(rope_type="yarn"), "rope_type 'yarn'"),
    (lambda c: c["rope_parameters"].update(mrope_section=[8, 0, 0]), "mrope_section"),
    (lambda c: c["rope_parameters"].update(mrope_section=[4, 3, 2]), "mrope_section"),
    (lambda c: c["rope_parameters"].pop("rope_theta"), "'rope_theta' is missing"),
    (lambda c: c.update(quantization_config={"quant_method": "fp8"}), "quantised"),
    (lambda c: c.update(num_hidden_layers=5, layer_types=["linear_attention"] * 5), "layer 4 is not stored"),
    (lambda c: c.update(num_hidden_layers=3, layer_types=["linear_attention"] * 3), "layer 3 is stored"),
    (lambda c: c.update(hidden_size=96), r"shape \[1024, 64\], config.json asks for \[1024, 96\]"),
    (lambda c: c.update(num_experts=9), r"mlp.gate.weight' has shape \[8, 64\], config.json asks for \[9, 64\]"),
    (lambda c: c.update(eos_token_id=2000), "eos_token_id 2000"),
]


@pytest.mark.parametrize("change, message", CONFIGS, ids=[message for _, message in CONFIGS])
def test_config_at_fault(use, change, message):
    folder = use("qwen")
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", change)
    refused(folder, message)


CLOVER_CONFIGS = [
    (lambda c: c.update(block_sizes=[4, 8]), r"block_size_head.weight' has shape \[4, 64\]"),
    (lambda c: c.update(confidence_threshold=95), "confidence_threshold"),
    (lambda c: c.update(shift_logits="yes"), "shift_logits"),
    (lambda c: c.update(block_size=4097), "block_size must be a whole number from 1 to 4096"),
    (lambda c: c.update(block_sizes=[4, 8, 16, 4097]), "block_sizes must be a whole number from 1 to 4096"),
    (lambda c: c.update(mask_token_id=1016), "mask_token_id is 1016 in config.json, but 1017"),
    (lambda c: c.update(model_type="qwen3_5_moe_text"), r"unknown.*(block_size_head|mem_gate|block_scale)"),
]


@pytest.mark.parametrize("change, message", CLOVER_CONFIGS, ids=[message for _, message in CLOVER_CONFIGS])
def test_clover_config_at_fault(use, change, message):
    folder = use("clover")
    edit_json(folder / "config.json", change)
    refused(folder, message)


NORM = "model.layers.1.input_layernorm.weight"
A_LOG = "model.layers.0.linear_attn.A_log"
EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"
OUT = "model.layers.0.linear_attn.out_proj.weight"
TENSORS = [
    ("qwen", lambda t: t.pop(NORM), f"missing.*{NORM}"),
    ("qwen", lambda t: t.pop("lm_head.weight"), "missing.*lm_head.weight"),
    ("qwen", lambda t: t.pop("model.layers.2.mlp.experts.5.up_proj.weight"), r"missing.*layers\.2\.mlp\.experts\.5\.up_proj"),
    (
        "qwen",
        lambda t: t.update({"model.layers.2.mlp.experts.8.up_proj.weight": torch.zeros(96, 64)}),
        r"unknown.*experts\.8\.up_proj",
    ),
    ("clover", lambda t: t.pop("model.layers.0.linear_attn.mem_gate.bias"), "missing.*mem_gate.bias"),
    ("clover", lambda t: t.pop("model.block_size_head.bias"), "missing.*block_size_head.bias"),
    ("qwen", lambda t: t.update({OUT: t[OUT].T}), rf"{OUT}' has shape \[192, 64\]"),
    ("qwen", lambda t: t.update({OUT: t[OUT].flatten()}), rf"{OUT}' has shape \[12288\]"),
    ("qwen", lambda t: t.update({"model.layers.0.linear_attn.extra": torch.zeros(1)}), "unknown.*linear_attn.extra"),
    ("qwen", lambda t: t.update({NORM.replace("model.", "model.language_model."): t[NORM]}), "same tensor under two names"),
    ("clover", lambda t: t.update({"model.layers.0.mlp.experts.0.down_proj.weight": torch.zeros(64, 96)}), "unknown.*experts.0"),
    ("qwen", lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)}), f"{NORM}' is F8_E4M3"),
    ("qwen", lambda t: t.update({NORM: t[NORM].double()}), f"{NORM}' is F64"),
    ("qwen", lambda t: t[OUT].view(-1)[77].fill_(float("nan")), f"{OUT}' has values that are not finite"),
    ("qwen", lambda t: t[OUT].view(-1)[77].fill_(float("-inf")), f"{OUT}' has values that are not finite"),
    ("qwen", lambda t: t[EXPERT][0].fill_(1e7), f"{EXPERT}': a value is too large"),
    ("qwen", lambda t: t[A_LOG].fill_(100), f"{A_LOG}' has values too large for blk.0.ssm_a"),
    ("qwen", lambda t: t[OUT].view(-1)[77].fill_(1e7), f"{OUT}': a value is too large"),
]


@pytest.mark.parametrize("checkpoint, change, message", TENSORS, ids=[message for *_, message in TENSORS])
def test_tensors_at_fault(use, checkpoint, change, message):
    folder = use(checkpoint)
    edit_tensors(folder, change)
    refused(folder, message)


def test_value_beyond_f16_names_the_tensor(use):
    folder = use("qwen")
    edit_tensors(folder, lambda t: t[OUT].view(-1)[77].fill_(70000.0))
    refused(folder, f"{OUT}': the value 70000 is above 65504.*bf16", type="f16")
    convert(folder, folder / "model.gguf", type="bf16")


def shard(folder, number=2):
    return sorted(folder.glob("model-*.safetensors"))[number]


def test_missing_shard(use):
    folder = use("sharded")
    missing = shard(folder)
    missing.unlink()
    refused(folder, f"names the file '{missing.name}', which is missing")


def test_index_at_fault(use):
    folder = use("sharded")
    index = folder / "model.safetensors.index.json"
    original = index.read_text()
    name = "model.norm.weight"
    changes = [
        (
            lambda i: i["weight_map"].update({name: "model-99999-of-00007.safetensors"}),
            "model-99999-of-00007.safetensors', which is missing",
        ),
        (lambda i: i["weight_map"].update({name: shard(folder, 0).name}), f"places tensor '{name}' in"),
        (lambda i: i["weight_map"].update({name: "../qwen/model.safetensors"}), "not a plain file name"),
        (lambda i: i["weight_map"].update({name: "a" * 5000}), "'aaaa.*', which is missing"),
        (lambda i: i["weight_map"].update({name: "a\nb\0"}), r"'a\\nb\\x00', which is missing"),
        (lambda i: i["weight_map"].pop(name), f"missing.*{name}"),
        (lambda i: i.pop("weight_map"), "weight_map"),
    ]
    for change, message in changes:
        index.write_text(original)
        edit_json(index, change)
        refused(folder, message)
    index.write_text(original[:100])
    refused(folder, "not valid JSON")


@pytest.mark.parametrize("kept", [0, 7, 100, 5000, -1])
def test_truncated_safetensors(use, kept):
    folder = use("qwen")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(folder, "truncated")


def entry(**changes):
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


HEADERS = [
    (b"\xff\xff", 0, "not valid JSON"),
    (b"[1]", 0, "not a JSON object"),
    (b"[" * 100000, 0, "not valid JSON"),
    (b'{"t":1,"t":2}', 0, "'t' occurs twice"),
    (entry(dtype="F99"), 8, "unknown dtype"),
    (entry(dtype=["F32"]), 8, "unknown dtype"),
    (entry(shape=[3]), 8, r"8 bytes do not hold a F32 tensor of shape \[3\]"),
    (entry(shape=[2.0]), 8, "whole numbers"),
    (entry(shape=[-2], data_offsets=[8, 0]), 8, "whole numbers"),
    (entry(shape=[2**63, 2**63]), 8, "do not hold"),
    (entry(shape=None), 8, "malformed"),
    (entry(data_offsets=[0]), 8, "malformed"),
    (entry(data_offsets=[8, 16]), 16, "a hole or an overlap"),
    ({**entry(), "u": entry(data_offsets=[4, 12])["t"]}, 12, "a hole or an overlap"),
    (entry(), 7, "truncated"),
    (entry(), 9, "1 bytes follow"),
    ({"t": None}, 0, "malformed"),
]


@pytest.mark.parametrize("header, data, message", HEADERS, ids=[f"{i}: {row[2]}" for i, row in enumerate(HEADERS)])
def test_malformed_safetensors_header(use, header, data, message):
    folder = use("qwen")
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(data))
    refused(folder, message)


def test_header_length_beyond_reason(use):
    folder = use("qwen")
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**64 - 1) + b"{}")
    refused(folder, "truncated inside the header")


def test_missing_files(use):
    folder = use("qwen")
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        (folder / name).unlink()
        refused(folder, f"no {name}.*in")
    refused(folder / "absent", "no such folder")
    refused(folder / "tokenizer_config.json", "not a folder")


def test_config_is_not_json(use):
    folder = use("qwen")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json: not valid JSON")
    (folder / "config.json").write_bytes(b"\xff\xfe")
    refused(folder, "config.json")


def test_output_at_fault(use, tmp_path):
    folder = use("qwen")
    with pytest.raises(CheckpointError, match="no folder"):
        convert(folder, tmp_path / "absent" / "model.gguf")
    with pytest.raises(CheckpointError, match="is a folder"):
        convert(folder, tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(CheckpointError, match="no regular file"):
        convert(folder, tmp_path / "fifo")
    with pytest.raises(ResourceError, match="File name too long"):
        convert(folder, tmp_path / ("a" * 300))
    with pytest.raises(CheckpointError, match="File name too long"):
        convert(tmp_path / ("a" * 300), tmp_path / "model.gguf")
    with pytest.raises(ArgumentError, match="q4_k_xxl"):
        convert(folder, tmp_path / "model.gguf", type="q4_k_xxl")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "README.md"])
def test_output_is_a_file_of_the_checkpoint(use, tmp_path, name):
    folder = use("qwen")
    (folder / "README.md").write_text("about")
    before = (folder / name).read_bytes()
    (tmp_path / "link.gguf").symlink_to(folder / name)
    for output in (folder / name, tmp_path / "link.gguf"):
        with pytest.raises(CheckpointError, match="file of the checkpoint"):
            convert(folder, output)
        assert (folder / name).read_bytes() == before


@pytest.mark.parametrize("exists", [True, False])
def test_output_through_a_link(use, tmp_path, exists):
    (tmp_path / "out").mkdir()
    if exists:
        (tmp_path / "out" / "model.gguf").write_bytes(b"older")
    (tmp_path / "link").symlink_to("out/model.gguf")
    convert(use("qwen"), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "out" / "model.gguf").read_bytes()[:4] == b"GGUF"
    assert os.listdir(tmp_path / "out") == ["model.gguf"]


def test_names_of_any_kind(use, tmp_path):
    folder = use("qwen").rename(os.fsdecode(os.fsencode(tmp_path) + b"/qw\xff\n"))
    output = tmp_path / ("m" * 250)
    convert(folder, output)
    assert gguf.GGUFReader(output).get_field("general.name").contents() == "qw?\n"


def test_unreadable_checkpoint_files(use):
    folder = use("qwen")
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    refused(folder, "model.safetensors: not a regular file")


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_text_files_that_never_end(use, name):
    folder = use("qwen")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    refused(folder, f"{name}: not a regular file")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may do everything")
def test_permissions(use, tmp_path):
    folder = use("qwen")
    closed = tmp_path / "closed"
    for mode in (0o600, 0o500):
        closed.mkdir(mode)
        with pytest.raises(ResourceError, match="cannot write .*Permission denied"):
            convert(folder, closed / "model.gguf")
        closed.rmdir()
    for path, mode in ((folder, 0o300), (folder / "tokenizer.json", 0), (folder / "model.safetensors", 0)):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.raises(CheckpointError, match="Permission denied"):
            convert(folder, tmp_path / "model.gguf")
        path.chmod(before)


def python(code, *arguments, **variables):
    """Run Python code with the converter importable; `arguments` are its sys.argv[1:]."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    variables = {name: str(int(value)) for name, value in variables.items()}
    return subprocess.run(command, env={**ENVIRONMENT, **variables}, capture_output=True, text=True)


PARTIAL = ["model.gguf.partial", "model.gguf.partial.json"]

LIMITED = """
import resource, sys
from clover_convert import convert
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
convert(*sys.argv[1:])
"""


def test_full_disk(use, tmp_path):
    (tmp_path / "out").mkdir()
    run = python(LIMITED, use("qwen"), tmp_path / "out" / "model.gguf")
    assert re.search(r"ResourceError: cannot write .*model.gguf: File too large", run.stderr.strip()), run.stderr
    assert sorted(os.listdir(tmp_path / "out")) == PARTIAL


def test_interrupted(use, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(use("qwen"), tmp_path / "model.gguf", progress=interrupt)
    assert sorted(os.listdir(tmp_path)) == [*PARTIAL, "qwen"]


TERMINATED = """
import os
import clover_convert.cli as cli
class Shown:
    def __init__(self, *_): pass
    def __exit__(self, *_): pass
    def __enter__(self):
        return lambda done, total: os.kill(os.getpid(), int(os.environ["SIGNAL"]))
cli.shown = Shown
from clover_convert.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_terminated(use, tmp_path, number):
    (tmp_path / "out").mkdir()
    run = python(TERMINATED, use("qwen"), tmp_path / "out" / "model.gguf", SIGNAL=number)
    assert run.returncode == 128 + number, run.stderr
    assert "continue with --resume" in run.stderr
    assert sorted(os.listdir(tmp_path / "out")) == PARTIAL


def command(*arguments):
    run = [sys.executable, "-m", "clover_convert", *map(str, arguments)]
    return subprocess.run(run, env=ENVIRONMENT, capture_output=True, text=True)


def test_command(use, tmp_path):
    folder = use("clover")
    run = command(folder, tmp_path / "a.gguf", "--type", "bf16")
    assert run.returncode == 0 and "a.gguf: bf16" in run.stdout and not run.stderr
    convert(folder, tmp_path / "b.gguf", type="bf16")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_command_reports_errors_on_one_line(use, tmp_path):
    folder = use("qwen")
    (folder / "tokenizer.json").unlink()
    run = command(folder, tmp_path / "model.gguf")
    assert run.returncode == 1 and not run.stdout
    assert run.stderr == f"clover-convert: error: no tokenizer.json and no tokenizer.model in {folder}\n"
    assert os.listdir(tmp_path) == ["qwen"]
    run = command(folder, tmp_path / "model.gguf", "--type", "q4_k_xxl")
    assert run.returncode == 1 and "q4_k_xxl" in run.stderr
    for arguments in ((), (folder,), (folder, "a", "b"), ("--absent",), (folder, "a", "--threads", "x")):
        run = command(*arguments)
        assert run.returncode == 2 and not run.stdout
        assert re.fullmatch(r"clover-convert: error: .* \(see clover-convert --help\)\n", run.stderr), run.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_command_with_a_full_standard_output(use, tmp_path):
    run = [sys.executable, "-m", "clover_convert", use("qwen"), tmp_path / "model.gguf"]
    with open("/dev/full", "w") as full:
        run = subprocess.run(run, env=ENVIRONMENT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert run.returncode == 1
    assert run.stderr == "clover-convert: error: cannot write to standard output: No space left on device\n"


def test_command_shows_names_on_one_line(use, tmp_path):
    folder = use("qwen")
    run = command(folder, tmp_path / "a\nb\x1b[31m.gguf")
    assert run.returncode == 0 and run.stdout.count("\n") == 1 and "a\ufffdb\ufffd[31m.gguf: q8_0" in run.stdout
    edit_tensors(folder, lambda t: t.update({"a\nb": torch.zeros(1)}))
    run = command(folder, tmp_path / "model.gguf")
    assert run.returncode == 1 and run.stderr.count("\n") == 1 and "unknown in a checkpoint of this kind: a\ufffdb" in run.stderr


PEAK = """
import pathlib, sys
from clover_convert import convert
convert(*sys.argv[1:])
print(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


def peak(folder, output):
    """Peak memory of a conversion in MiB."""
    run = python(PEAK, folder, output)
    assert run.returncode == 0, run.stderr
    output.unlink()
    return int(run.stdout) / 1024


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("fused", [False, True])
def test_memory_does_not_grow_with_the_checkpoint(use, tmp_path, fused):
    """Tensors of 64 MiB, and 400 MiB of experts: the peak stays about where a tiny checkpoint has it."""
    small = use("qwen")
    large = tmp_path / "large"
    shutil.copytree(small, large)
    vocab, inner = 1 << 18, 1 << 15
    edit_json(large / "config.json", lambda c: c.update(vocab_size=vocab, moe_intermediate_size=inner))

    def enlarge(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = torch.ones(vocab, 64)
        for layer in range(4):
            experts = f"model.layers.{layer}.mlp.experts."
            for expert in range(8):
                for matrix in ("gate_proj", "up_proj", "down_proj"):
                    shape = (64, inner) if matrix == "down_proj" else (inner, 64)
                    tensors[f"{experts}{expert}.{matrix}.weight"] = torch.ones(shape, dtype=torch.bfloat16)
            if fused:
                parts = {
                    matrix: torch.stack([tensors.pop(f"{experts}{expert}.{matrix}.weight") for expert in range(8)])
                    for matrix in ("gate_proj", "up_proj", "down_proj")
                }
                tensors[experts + "gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
                tensors[experts + "down_proj"] = parts["down_proj"]

    edit_tensors(large, enlarge)
    tensors = (large / "model.safetensors").stat().st_size >> 20
    before, after = peak(small, tmp_path / "small.gguf"), peak(large, tmp_path / "large.gguf")
    print(f"peak {before:.0f} MiB for a tiny checkpoint, {after:.0f} MiB for one of {tensors} MiB")
    # what it grows by are the 262,144 tokens of the padded vocabulary
    assert tensors > 500
    assert after - before < 100
