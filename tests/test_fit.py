"""The memory that fit.py counts against what llama.cpp says it allocates, and against the process that runs the model."""

import functools
import json
import math
import os
import shutil
import subprocess
import sys

import gguf
import pytest

from checkpoints import tiny_qwen
from clover_bench import slice35b
from clover_convert import convert
from clover_convert.checkpoint import Checkpoint
from clover_convert.conversion import outline, prepare, read
from clover_cpp import ArgumentError, ModelFileError
from clover_quant import fit, recipes
from conftest import ROOT
from llama_memory import buffers

ROUNDING = 0.00501 * 2**20  # of the log's figures


def facts(path):
    """metadata and bytes of the tensors, by the gguf package."""
    reader = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    return metadata, sum(int(tensor.n_bytes) for tensor in reader.tensors)


@pytest.fixture(scope="module")
def wide(library, tmp_path_factory):
    """Path, metadata and bytes of two layers with the 35B-A3B's widths and vocabulary, but only the 8 experts that are chosen.

    The BF16 weights are zeros: a hole in the file.
    """
    folder = tmp_path_factory.mktemp("wide")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(slice35b.TEXT, "num_experts", 8)
        patch.setitem(slice35b.TEXT, "full_attention_interval", 2)
        checkpoint(folder / "checkpoint", 2)
    with Checkpoint(folder / "checkpoint") as opened:
        source, recipe = read(opened), recipes.load("bf16")
        job = prepare(source, recipe)
    (shard,) = job.shards
    with open(folder / "model.gguf", "wb") as file:
        file.write(shard.header)
        file.truncate(shard.size)
    return folder / "model.gguf", *outline(source, recipe)


def checkpoint(folder, layers):
    """A checkpoint of slice35b's shape, whose weights are a hole in the file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(slice35b.config(layers, "clover", False)))
    for name in slice35b.TOKENIZER_FILES:
        shutil.copy(slice35b.CHECKPOINT / name, folder)
    header, at = {}, 0
    for name, shape in slice35b.tensors(layers, "clover", False):
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    raw = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + at)
    return folder


def assert_covers(path, model, library, context, window):
    allocated = buffers(library, path, context, window)
    needed = fit.memory(*model, context)
    assert abs(needed.state - allocated["RS"]) < ROUNDING
    assert abs(needed.cache - allocated["KV"]) < ROUNDING
    assert allocated["compute"] + allocated["output"] <= needed.buffers
    return allocated, needed


@pytest.mark.parametrize("context", [128, 300, 4096])
def test_state_and_cache_of_the_bundled_model_are_exact(context, library, bundled_gguf):
    path = bundled_gguf("q8_0")
    assert_covers(path, facts(path), library, context, 64)


def test_state_and_cache_of_a_qwen_are_exact(library, tmp_path):
    tiny_qwen(tmp_path / "checkpoint", num_attention_heads=8, linear_num_value_heads=8, num_experts_per_tok=4)
    convert(tmp_path / "checkpoint", tmp_path / "model.gguf", type="bf16")
    model = facts(tmp_path / "model.gguf")
    for context in (1000, 4096):
        assert_covers(tmp_path / "model.gguf", model, library, context, 0)
    assert fit.memory(*model, 4096) == fit.memory(*model, 100_000)  # the model's own limit


@pytest.mark.slow
def test_buffers_at_the_real_widths(library, wide):
    path, *model = wide
    for context in (1024, 32768):
        allocated, needed = assert_covers(path, model, library, context, 64)
        logits = 64 * 248_320 * 4  # the log does not say how the outputs grow
        assert needed.buffers < 2 * (allocated["compute"] + logits) + 64 * 2**20


PROCESS = """
import re, sys
from clover_cpp import Clover
with Clover(sys.argv[1], n_ctx=int(sys.argv[2])) as clover:
    for mode in ("ar", "block"):
        list(clover.generate([5] * 600, mode=mode, max_tokens=40))
    status = open("/proc/self/status").read()
print(int(re.search(r"RssAnon:\\s*(\\d+) kB", status)[1]) * 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
@pytest.mark.parametrize("model", ["bundled", "wide"])
def test_the_process_takes_no_more(model, library, bundled_gguf, wide):
    """Memory of its own, that is without the mapped file's pages."""
    path, *facts_of = (bundled_gguf("bf16"), *facts(bundled_gguf("bf16"))) if model == "bundled" else wide
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "bindings"), "OMP_WAIT_POLICY": "passive"}
    taken = int(subprocess.check_output([sys.executable, "-c", PROCESS, path, "1024"], env=environment))
    needed = fit.memory(*facts_of, 1024)
    assert taken <= needed.total - needed.weights < 2 * taken


def full_size(folder):
    """Function of a recipe's name: metadata and bytes of the tensors of all 40 layers of the 35B-A3B, never read."""
    made = checkpoint(folder / "full", 40)
    with Checkpoint(made) as opened:
        source = read(opened)

    return functools.cache(lambda name: outline(source, recipes.load(name)))


def test_the_35b_shape(library, tmp_path):
    """Weights by the count of parameters, state and cache by hand from the published figures."""
    plan = full_size(tmp_path)
    needed = fit.memory(*plan("bf16"), 131_072)
    assert needed.state == 2 * 30 * (32 * 128 * 128 + 3 * (2 * 16 * 128 + 32 * 128)) * 4
    assert needed.cache == 10 * 131_072 * 2 * 2 * 256 * 2
    assert 34e9 < needed.weights / 2 < 36e9
    assert needed.buffers < 1e9
    previous = None
    for limit in (40, 32, 26, 24, 20, 18, 16, 14.5):
        name, chosen = fit.choose(limit * 10**9, 8192, plan)
        assert chosen == fit.memory(*plan(name), 8192) and chosen.total <= limit * 10**9
        ranks = recipes.by_rank()
        better = ranks[: ranks.index(name)]
        assert all(fit.memory(*plan(other), 8192).total > limit * 10**9 for other in better)
        assert name != previous
        previous = name
    with pytest.raises(ArgumentError, match=r"no recipe fits into 8.00 GB; the smallest, edge_q2, needs 1\d\.\d\d weights \+ "):
        fit.choose(8 * 10**9, 8192, plan)
    with pytest.raises(ArgumentError, match="context of 0"):
        fit.choose(8 * 10**9, 0, plan)


def test_sum_is_printed():
    assert str(fit.Memory(16_120_000_000, 130_000_000, 170_000_000, 310_000_000)) == (
        "16.12 weights + 0.13 state + 0.17 keys and values + 0.31 buffers = 16.73 GB"
    )
    assert (
        str(fit.Memory(5_000_000, 0, 10_000, 90_000)) == "5.00 weights + 0.00 state + 0.01 keys and values + 0.09 buffers = 5.10 MB"
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("16GB", 16 * 10**9), ("16 gb", 16 * 10**9), ("16G", 16 * 10**9), ("8GiB", 8 * 2**30), ("500M", 5 * 10**8),
        ("1.5KiB", 1536), ("4096", 4096), ("2TB", 2 * 10**12), (" 1k ", 1000), ("7B", 7),
    ],
)  # fmt: skip
def test_sizes(text, size):
    assert fit.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0", "-1G", "1.G", "1e9", "16XB", "16 G B", "nan", "9" * 400, "٣GB"])
def test_wrong_sizes(text):
    with pytest.raises(ArgumentError, match="is no size"):
        fit.parse_size(text)


def command(*arguments, module="clover_quant"):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("convert", "quant", "bindings"))}
    run = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.run(run, env=environment, capture_output=True, text=True)


def test_command_prints_the_sum(library, bundled_gguf, tmp_path):
    path = bundled_gguf("bf16")
    run = command("fit", path, "--context", 1000)
    assert (run.returncode, run.stderr) == (0, "") and run.stdout == f"{fit.memory(*facts(path), 1000)}\n"

    def plan(name):
        convert(ROOT / "models" / "clover-tiny", tmp_path / f"{name}.gguf", type=name)
        return facts(tmp_path / f"{name}.gguf")

    limit = fit.memory(*plan("q4_k_m"), 1000).total
    name, needed = fit.choose(limit, 1000, plan)
    run = command("fit", path, "--context", 1000, "--fit", limit)
    assert (run.returncode, run.stderr) == (0, "") and run.stdout.startswith(f"{name} fits into ") and str(needed) in run.stdout


def test_converter_takes_the_recipe_that_fits(library, tmp_path):
    source, output = ROOT / "models" / "clover-tiny", tmp_path / "model.gguf"
    convert(source, tmp_path / "q6_k.gguf", type="q6_k")
    metadata, size = facts(tmp_path / "q6_k.gguf")
    limit = fit.memory(metadata, size, 300).total
    run = command(source, output, "--fit", limit, "--context", 300, module="clover_convert")
    assert (run.returncode, run.stderr) == (0, "") and f"q6_k fits into {fit.size_text(limit)}: " in run.stdout
    assert output.read_bytes() == (tmp_path / "q6_k.gguf").read_bytes()
    output.unlink()
    run = command(source, output, "--fit", "1M", module="clover_convert")
    assert run.returncode == 1 and "no recipe fits into 1.00 MB" in run.stderr and not output.exists()


def test_a_split_model_is_all_its_files(library, bundled_gguf, tmp_path):
    convert(ROOT / "models" / "clover-tiny", tmp_path / "s.gguf", type="bf16", split_max_size=2_000_000)
    first, second, *_ = sorted(tmp_path.iterdir())
    assert command("fit", first).stdout == command("fit", bundled_gguf("bf16")).stdout
    assert command("fit", first, "--fit", "100MB").stdout == command("fit", bundled_gguf("bf16"), "--fit", "100MB").stdout != ""
    assert "a later file of several" in command("fit", second).stderr
    second.unlink()
    assert f"{second}: No such file" in command("fit", first).stderr
    first = first.rename(tmp_path / "first.gguf")
    assert "but its name is not one of those" in command("fit", first).stderr


def test_command_lists_recipes(library):
    run = command("recipes")
    assert run.returncode == 0 and [line.split()[0] for line in run.stdout.splitlines()] == recipes.by_rank()
    run = command("recipes", "Q4_K_M")
    assert run.returncode == 0 and run.stdout == recipes.source("q4_k_m")


def test_command_errors_are_one_line(library, bundled_gguf, tmp_path):
    (tmp_path / "text.gguf").write_text("no model")
    whole = bundled_gguf("bf16").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[:3000])
    (tmp_path / "keyless.gguf").write_bytes(whole.replace(b"clover.ssm.inner_size", b"clover.ssm.inner_sizf"))
    for arguments, code, message in (
        (("fit", tmp_path / "absent.gguf"), 1, "No such file"),
        (("fit", tmp_path), 1, "directory"),
        (("fit", tmp_path / "text.gguf"), 1, "not a GGUF file"),
        (("fit", tmp_path / "cut.gguf"), 1, "damaged"),
        (("fit", tmp_path / "keyless.gguf"), 1, "has no clover.ssm.inner_size"),
        (("fit", bundled_gguf("f32"), "--fit", "16GB"), 1, "take a BF16 one"),
        (("fit", bundled_gguf("bf16"), "--fit", "16XB"), 1, "'16XB' is no size"),
        (("fit", bundled_gguf("bf16"), "--fit", ""), 1, "'' is no size"),
        (("fit", bundled_gguf("bf16"), "--fit", "1M"), 1, "no recipe fits into 1.00 MB"),
        (("fit", bundled_gguf("bf16"), "--context", "0"), 2, "--context"),
        (("recipes", "nix"), 1, "no recipe 'nix'"),
        (("nonsense",), 2, "nonsense"),
        ((), 2, "Missing command"),
    ):
        run = command(*arguments)
        assert (run.returncode, run.stdout, run.stderr.count("\n")) == (code, "", 1), run.stderr
        assert run.stderr.startswith("clover-quantize: error: ") and message in run.stderr


def test_missing_metadata():
    with pytest.raises(ModelFileError, match="no clover.block_count"):
        fit.memory({"general.architecture": "clover"}, 0, 1)
