"""Failures of clover-convert beside broken checkpoints: one clear error each, an older output untouched, constant memory."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from clover_convert import convert
from clover_cpp.errors import ArgumentError, CheckpointError, ResourceError
from conftest import CONVERTER


@pytest.fixture
def use(tiny_checkpoints, tmp_path):
    """A function: name of an original checkpoint -> a copy to damage."""
    return lambda name: shutil.copytree(tiny_checkpoints / name, tmp_path / name)


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


def test_older_output_outlives_a_failure(use):
    folder = use("qwen")
    (folder / "tokenizer.json").write_text("{")
    refused(folder, "tokenizer.json: not valid JSON")
    edit_tensors(use("clover"), lambda t: t["model.layers.3.mlp.gate.weight"].fill_(float("nan")))  # found on the way
    refused(folder.with_name("clover"), "not finite")


def test_no_folder(use):
    folder = use("qwen")
    refused(folder / "absent", "no such folder")
    refused(folder / "tokenizer_config.json", "not a folder")


def test_output_at_fault(use, tmp_path):
    folder = use("qwen")
    with pytest.raises(ArgumentError, match=f"there is no folder {tmp_path / 'absent'}$"):
        convert(folder, tmp_path / "absent" / "model.gguf")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent" / "model.gguf")
    with pytest.raises(ArgumentError, match=f"there is no folder {tmp_path / 'absent'}$"):
        convert(folder, tmp_path / "dangling")
    with pytest.raises(ArgumentError, match="is a folder"):
        convert(folder, tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ArgumentError, match="no regular file"):
        convert(folder, tmp_path / "fifo")
    with pytest.raises(ArgumentError, match="File name too long"):
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
        with pytest.raises(ArgumentError, match=f"it is the input {folder / name}"):
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
    return subprocess.run(command, env={**CONVERTER, **variables}, capture_output=True, text=True)


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
    return subprocess.run(run, env=CONVERTER, capture_output=True, text=True)


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
        run = subprocess.run(run, env=CONVERTER, stdout=full, stderr=subprocess.PIPE, text=True)
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
