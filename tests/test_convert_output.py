"""clover-convert's options that shape or check the output: split files, verification, dry run, values that are not finite."""

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

from checkpoints import tiny_clover, tiny_qwen
from clover_convert import convert
from clover_cpp import Clover, ggml
from clover_cpp.errors import ArgumentError, CheckpointError, ModelFileError
from clover_quant import recipes
from conftest import BUNDLED, CONVERTER
from llama_run import run

OUT = "model.layers.0.linear_attn.out_proj.weight"
TYPES = [name for name in ggml.NUMBERS if not name.startswith(("iq1", "iq2", "iq3_xxs"))]  # those need importance, or are slow
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("output") / "tiny-qwen"
    tiny_qwen(folder, hidden_size=256, moe_intermediate_size=256)
    return folder


def command(*arguments):
    words = [sys.executable, "-m", "clover_convert", *map(str, arguments)]
    return subprocess.run(words, env=CONVERTER, capture_output=True, text=True)


def change(folder, target, edit):
    """A copy of a checkpoint whose tensors `edit` has changed."""
    shutil.copytree(folder, target)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


# Split files


def shards(folder):
    return sorted(path for path in folder.iterdir() if "-of-" in path.name)


def test_split_files_load_in_an_unmodified_llama(qwen, plain_library, tmp_path):
    convert(qwen, tmp_path / "whole.gguf", "f32")
    (tmp_path / "split").mkdir()
    result = convert(qwen, tmp_path / "split" / "m.gguf", "f32", split_max_size=3_000_000, verify=True)
    paths = shards(tmp_path / "split")
    assert [path.name for path in paths] == [f"m-{i:05d}-of-{len(paths):05d}.gguf" for i in range(1, len(paths) + 1)]
    assert len(paths) >= 4 and result.paths == paths and result.size == sum(path.stat().st_size for path in paths)
    assert sorted(os.listdir(tmp_path / "split")) == [path.name for path in paths]
    passes = [("causal", [5, 6, 7, 300])]
    split, whole = (run(plain_library, path, passes)[0] for path in (paths[0], tmp_path / "whole.gguf"))
    assert np.array_equal(split, whole)


def test_split_files_hold_the_keys_and_tensors_of_gguf_split(qwen, tmp_path):
    convert(qwen, tmp_path / "whole.gguf", "q4_k")
    (tmp_path / "split").mkdir()
    convert(qwen, tmp_path / "split" / "m.gguf", "q4_k", split_max_size=500_000)
    whole = gguf.GGUFReader(tmp_path / "whole.gguf")
    tensors = {tensor.name: tensor.data.tobytes() for tensor in whole.tensors}
    found = []
    readers = [gguf.GGUFReader(path) for path in shards(tmp_path / "split")]
    types = {"split.no": "UINT16", "split.count": "UINT16", "split.tensors.count": "INT32"}  # tools/gguf-split/gguf-split.cpp
    for number, reader in enumerate(readers):
        values = {"split.no": number, "split.count": len(readers), "split.tensors.count": len(tensors)}
        for key, kind in types.items():
            assert reader.get_field(key).contents() == values[key]
            assert [value.name for value in reader.get_field(key).types] == [kind]
        others = {key for key in reader.fields if not key.startswith(("split.", "GGUF."))}
        assert others == ({key for key in whole.fields if not key.startswith("GGUF.")} if number == 0 else set())
        found += [tensor.name for tensor in reader.tensors]
        assert len(reader.tensors) == 1 or sum(tensor.n_bytes for tensor in reader.tensors) <= 500_000
        for tensor in reader.tensors:
            assert tensor.data.tobytes() == tensors[tensor.name]
    assert found == list(tensors)


def test_split_files_run_in_the_fork(library, tmp_path):
    convert(BUNDLED, tmp_path / "m.gguf", "q8_0", split_max_size=2_000_000)
    convert(BUNDLED, tmp_path / "whole.gguf", "q8_0")
    answers = []
    for path in (shards(tmp_path)[0], tmp_path / "whole.gguf"):
        with Clover(path) as clover:
            answers.append("".join(clover.generate([{"role": "user", "content": "My name is Anna Berg."}], max_tokens=20)))
    assert answers[0] == answers[1] != ""


def test_shards_that_the_user_might_not_expect_are_named(qwen, tmp_path):
    run = command(qwen, tmp_path / "m.gguf", "--outtype", "q4_k", "--split-max-size", "100K")
    count = len(shards(tmp_path))
    assert run.returncode == 0 and re.search(rf"warning: \d+ of {count} files are larger than --split-max-size", run.stderr)
    run = command(qwen, tmp_path / "m.gguf", "--outtype", "q4_k", "--split-max-size", "50M", "--quiet")
    assert not run.stderr  # one file, another name
    run = command(qwen, tmp_path / "m.gguf", "--outtype", "q4_k", "--split-max-size", "2M")
    assert run.returncode == 0 and f"m-00001-of-{count:05d}.gguf is of a split into another number of files" in run.stderr


def test_one_file_is_no_split(qwen, tmp_path):
    run = command(qwen, tmp_path / "m.gguf", "--split-max-size", "5G")
    assert run.returncode == 0 and os.listdir(tmp_path) == ["m.gguf"]
    assert gguf.GGUFReader(tmp_path / "m.gguf").get_field("split.count") is None


@pytest.mark.parametrize("size", ["", "0", "5X", "-1", "G", "1e9"])
def test_sizes_that_are_none(qwen, tmp_path, size):
    run = command(qwen, tmp_path / "m.gguf", f"--split-max-size={size}")
    assert run.returncode in (1, 2) and run.stderr.count("\n") == 1 and repr(size) in run.stderr


# Verification


def whole_but_unnamed(checkpoint, output, type, **options):
    """Interrupt a conversion between its last byte and the end."""

    def progress(done, total):
        if done == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(checkpoint, output, type, progress=progress, **options)


def verify_damaged(checkpoint, output, type, damage):
    """Convert and verify; between the two, the function `damage` changes what was written."""
    moments = []

    def progress(done, total):
        if done == total and not moments:
            moments.append(done)
            damage(output.with_name(output.name + ".partial"))

    convert(checkpoint, output, type, verify=True, progress=progress)


def flip(path, offset, bits):
    with open(path, "r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ bits]))


@pytest.mark.parametrize("type", [pytest.param(name, marks=pytest.mark.slow if name == "iq3_s" else ()) for name in TYPES])
def test_verification_accepts_what_is_whole_and_finds_a_damaged_scale(qwen, tmp_path, type):
    """Random weights are within the bounds; a block whose scale lost or won its highest exponent bit is not."""
    kind = ggml.types()[type]
    pure = recipes.Recipe("pure", "", 0, type)
    output = tmp_path / "m.gguf"
    result = convert(qwen, output, pure, verify=True)
    assert result.worst.ratio <= 1 and (type == "f32" or result.worst.ratio > 0.1)
    tensor = next(t for t in gguf.GGUFReader(output).tensors if t.name == "blk.2.ffn_down_exps.weight")
    assert tensor.tensor_type == kind.number
    raw = tensor.data.reshape(-1).view(np.uint8)[: kind.block_bytes]
    values = ggml.dequantize(kind, raw, kind.block)
    changed = []
    for place in range(kind.block_bytes):
        other = raw.copy()
        other[place] ^= 0x40
        changed.append(np.abs(ggml.dequantize(kind, other, kind.block) - values).max())
    place = int(np.nan_to_num(changed, posinf=1e30).argmax())
    output.unlink()
    with pytest.raises(ModelFileError, match=r"tensor 'blk.2.ffn_down_exps.weight' differs from its source"):
        verify_damaged(qwen, output, pure, lambda part: flip(part, tensor.data_offset + place, 0x40))
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("type", ["q8_0", "q4_k", "q2_k", "mxfp4", "bf16", "f32"])
def test_verification_finds_exchanged_rows(qwen, tmp_path, type):
    pure = recipes.Recipe("pure", "", 0, type)

    def exchange(part):
        tensor = next(t for t in gguf.GGUFReader(part).tensors if t.name == "blk.1.attn_qkv.weight")
        size = ggml.types()[type].row_bytes(256)
        start = tensor.data_offset + 5 * size
        with open(part, "r+b") as file:
            file.seek(start)
            first, second = file.read(size), file.read(size)
            file.seek(start)
            file.write(second + first)

    with pytest.raises(ModelFileError, match="tensor 'blk.1.attn_qkv.weight' differs"):
        verify_damaged(qwen, tmp_path / "m.gguf", pure, exchange)


def test_verification_reads_the_header(qwen, tmp_path):
    with pytest.raises(ModelFileError, match="the header differs"):
        verify_damaged(qwen, tmp_path / "m.gguf", "q8_0", lambda part: flip(part, 40, 1))
    assert not os.listdir(tmp_path)


def test_command_verifies(qwen, tmp_path):
    run = command(qwen, tmp_path / "m.gguf", "--outtype", "Q4_K_M", "--verify")
    assert run.returncode == 0 and not run.stderr, run.stderr
    assert re.search(r"verified: every tensor is within its type's bound; \S+ comes closest, \d+% of it\n$", run.stdout)


# Dry run


@pytest.mark.parametrize("outtype", ["f32", "F16", "bf16", "Q8_0", "q4_k_m", "Q3_K_M", "iq4_xs", "q5_0", "edge_q4"])
def test_dry_run_tells_what_is_written(qwen, tmp_path, outtype):
    shown = command(qwen, tmp_path / "m.gguf", "--outtype", outtype, "--dry-run")
    assert shown.returncode == 0 and not shown.stderr and not os.listdir(tmp_path)
    convert(qwen, tmp_path / "m.gguf", outtype)
    *lines, total = shown.stdout.splitlines()
    for line, tensor in zip(lines, gguf.GGUFReader(tmp_path / "m.gguf").tensors, strict=True):
        name, *_, source, arrow, type, size = line.split()
        assert (name, arrow, type) == (tensor.name, "->", tensor.tensor_type.name.lower())
        assert source == "F32" and int(size.replace(",", "")) == tensor.n_bytes
    assert f"{(tmp_path / 'm.gguf').stat().st_size:,} bytes" in total


def test_dry_run_reads_no_weights_and_counts_files(qwen, tmp_path):
    folder = change(qwen, tmp_path / "nan", lambda t: t[OUT].fill_(float("nan")))
    shown = command(folder, tmp_path / "m.gguf", "--dry-run", "--split-max-size", "1M")
    assert shown.returncode == 0 and re.search(r"bytes in \d+ files$", shown.stdout.strip())
    assert os.listdir(tmp_path) == ["nan"]


def test_dry_run_looks_at_the_output(qwen, tmp_path):
    for output, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "absent" / "m.gguf", "no folder"),
        (qwen / "config.json", "input"),
    ):
        run = command(qwen, output, "--dry-run")
        assert (run.returncode, run.stdout, run.stderr.count("\n")) == (1, "", 1) and message in run.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["m.gguf", "--fit", "1GB", "--outtype", "q4_k_m"], "--outtype"),
        (["m.gguf", "--context", "300"], "--fit"),
        (["m.gguf", "--fit", ""], "'' is no size"),
        (["-"], "standard output"),
    ],
)
def test_options_that_would_be_without_effect(qwen, tmp_path, arguments, message):
    run = subprocess.run(
        [sys.executable, "-m", "clover_convert", qwen, *arguments], env=CONVERTER, capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode in (1, 2) and message in run.stderr and run.stderr.count("\n") == 1 and not os.listdir(tmp_path)


def test_names_as_llama_writes_them(qwen, tmp_path):
    command(qwen, tmp_path / "a.gguf", "--outtype", "Q4_K_M")
    command(qwen, tmp_path / "b.gguf", "--type", "q4_k_m")
    command(qwen, tmp_path / "c.gguf", "-t", "q4_K_m", "--threads", "1")
    assert len({(tmp_path / name).read_bytes() for name in ("a.gguf", "b.gguf", "c.gguf")}) == 1
    assert gguf.GGUFReader(tmp_path / "a.gguf").get_field("general.file_type").contents() == gguf.LlamaFileType.MOSTLY_Q4_K_M


# Values that are not finite


@pytest.fixture
def odd(qwen, tmp_path):
    """A checkpoint with 3 NaN and 2 infinite values in a matrix, one NaN in a norm."""

    def edit(tensors):
        flat = tensors[OUT].view(-1)
        flat[[5, 700, 701]] = float("nan")
        flat[9], flat[-1] = float("inf"), float("-inf")
        tensors[NORM][3] = float("nan")

    return change(qwen, tmp_path / "odd", edit)


@pytest.mark.parametrize("type", ["f32", "q4_k"])
def test_values_that_are_not_finite_are_named_and_counted(odd, tmp_path, type):
    with pytest.raises(CheckpointError, match=f"tensor '({OUT}' .*: 3 NaN, 2 infinite|{NORM}' .*: 1 NaN, 0 infinite)$"):
        convert(odd, tmp_path / "m.gguf", type)
    assert os.listdir(tmp_path) == ["odd"]


@pytest.mark.parametrize("type", ["f32", "f16", "bf16", "q8_0", "q4_k", "iq4_nl", "mxfp4"])
def test_values_that_are_not_finite_where_allowed(odd, qwen, tmp_path, type):
    run = command(odd, tmp_path / "m.gguf", "--outtype", type, "--allow-non-finite", "--verify")
    assert run.returncode == 0, run.stderr
    warning = "clover-convert: warning: tensor {} has values that are not finite: {}\n"
    assert sorted(run.stderr.splitlines(True)) == sorted(
        [warning.format(OUT, "3 NaN, 2 infinite"), warning.format(NORM, "1 NaN, 0 infinite")]
    )
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert np.isnan(tensors["blk.1.attn_norm.weight"].data[3])
    out = tensors["blk.0.ssm_out.weight"]
    found = ggml.dequantize(ggml.types()[out.tensor_type.name.lower()], out.data.view(np.uint8), 192)
    if type in ("f32", "f16", "bf16"):
        assert (np.isnan(found).sum(), np.isinf(found).sum()) == (3, 2)
    else:
        assert np.isfinite(found).all()


def test_counts_survive_an_interruption(odd, tmp_path):
    whole_but_unnamed(odd, tmp_path / "m.gguf", "q8_0", allow_non_finite=True)
    result = convert(odd, tmp_path / "m.gguf", resume=True, allow_non_finite=True)
    assert {name: str(count) for name, count in result.odd.items()} == {OUT: "3 NaN, 2 infinite", NORM: "1 NaN, 0 infinite"}


@pytest.mark.parametrize("type, value", [("f16", 70000), ("q4_k", 1e6), ("q8_0", 1e7)])
def test_values_that_a_type_does_not_hold(qwen, tmp_path, type, value):
    folder = change(qwen, tmp_path / "large", lambda t: t[OUT].view(-1)[77].fill_(value))
    with pytest.raises(CheckpointError, match=rf"tensor '{OUT}': a value is too large, {re.escape(f'{value:g}')} is above"):
        convert(folder, tmp_path / "m.gguf", recipes.Recipe("pure", "", 0, type), allow_non_finite=True)
    assert os.listdir(tmp_path) == ["large"]
    convert(folder, tmp_path / "m.gguf", "bf16", verify=True)


def test_largest_values_of_the_types():
    """What is let through does not abort the process: the largest value, everywhere in a row and once."""
    for name in TYPES:
        kind = ggml.types()[name]
        rows = np.zeros((3, 256), np.float32)
        rows[0], rows[1, 7], rows[2] = kind.largest, -kind.largest, np.linspace(-1, 1, 256) * kind.largest
        found = ggml.dequantize(kind, ggml.quantize(kind, rows), 256)
        assert np.isfinite(found).all(), name


def test_importance_must_exist_where_a_type_needs_it(qwen, tmp_path):
    with pytest.raises(ArgumentError, match="needs an importance matrix"):
        convert(qwen, tmp_path / "m.gguf", "iq2_xs")
    assert not os.listdir(tmp_path)


def test_fit(tmp_path):
    tiny_clover(tmp_path / "m", dtype=torch.bfloat16)
    run = command(tmp_path / "m", tmp_path / "m.gguf", "--fit", "1GB", "--context", "1024")
    assert run.returncode == 0 and "fits into 1.00 GB" in run.stdout
    run = command(tmp_path / "m", tmp_path / "n.gguf", "--fit", "1MB")
    assert run.returncode == 1 and "no recipe fits into" in run.stderr and not (tmp_path / "n.gguf").exists()
