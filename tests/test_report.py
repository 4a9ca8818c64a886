"""The quality report: its figures against PyTorch's, on the reference model's own logits; its outputs; what it refuses."""

import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree

import gguf
import model_files
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from clover_convert import convert
from clover_cpp import ArgumentError, Clover, EngineError, ModelFileError
from clover_quant.comparison import compare
from clover_quant.passes import Walk
from clover_quant.report import Settings, read_tasks, report, run_tasks
from clover_tiny import tasks
from clover_tiny.decode import block_decode
from clover_tiny.model import CloverModel
from conftest import BUNDLED, ROOT

pytestmark = pytest.mark.usefixtures("library")

QUICK = Settings(context=96, count=3, threads=1)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    shutil.copy(ROOT / "README.md", path)
    return path


def quantize(source, target, kind):
    command = [ROOT / "build" / "bin" / "llama-quantize", source, target, kind]
    assert subprocess.run(command, capture_output=True).returncode == 0
    return target


def command(*arguments, code=0):
    done = subprocess.run([sys.executable, "-m", "clover_quant", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def torch_rows(base, other, threshold, mask):
    """(divergence, same, fixed) by torch."""
    base, other = (torch.as_tensor(each).double() for each in (base, other))
    divergence = F.kl_div(other.log_softmax(-1), base.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    allowed = [each.softmax(-1).index_fill(-1, torch.tensor([mask]), -1) for each in (base, other)]
    same = allowed[0].argmax(-1) == allowed[1].argmax(-1)
    return divergence.numpy(), same.numpy(), (allowed[1].max(-1).values > threshold).numpy()


def test_divergence_and_choices_equal_torchs():
    random = np.random.default_rng(0)
    base = (random.standard_normal((50, 300)) * 5).astype(np.float32)
    other = base + random.standard_normal(base.shape).astype(np.float32)
    base[:9, 7] = 40  # the mask token: it is never chosen
    base[3] += 1e4
    rows = compare(base, other, 0.6, 7)
    divergence, same, fixed = torch_rows(base, other, 0.6, 7)
    assert np.allclose(rows.divergence, divergence, rtol=1e-9, atol=1e-12)
    assert np.array_equal(rows.same, same) and np.array_equal(rows.fixed, fixed)
    assert 0 < same.sum() < 50 and 0 < fixed.sum() < 50
    summary, flips = rows.summary(), rows.flips()
    assert summary["kld_99.9"] == pytest.approx(torch.tensor(divergence).quantile(0.999).item())
    assert summary["kld_mean"] == pytest.approx(divergence.mean()) and summary["top1"] == same.mean()
    assert flips == {"fixed": fixed.sum(), "flipped": (fixed & ~same).sum(), "rate": (fixed & ~same).sum() / fixed.sum()}
    assert (compare(base, base, 0.6).divergence == 0).all()
    for value in (np.nan, np.inf, -np.inf):
        other[49, 299] = value
        with pytest.raises(EngineError, match="not finite"):
            compare(base, other, 0.6)


@torch.no_grad()
@pytest.mark.parametrize("shift", [True, False])
def test_figures_equal_those_of_the_reference_models(shift, text):
    paths, models = zip(*(model_files.clover(shift_logits=shift, sharp=True, seed=seed) for seed in (1, 2)), strict=True)
    settings = Settings(context=96, count=3, threads=1, threshold=0.3)
    found = report(paths[0], [paths[1]], text, settings=settings)["models"][1]
    with Clover(paths[0]) as clover:
        tokens, info = clover.tokenize(text.read_text(encoding="utf-8")), clover.info
    walk, rows = Walk(info), {"causal": [], "full": [], "partial": []}
    for start in (0, 96, 192):
        states = [model.new_state() for model in models]
        for each in walk(tokens[start : start + 96]):
            pairs = zip(models, states, strict=True)
            logits = [getattr(model, each.kind)(torch.tensor(each.tokens), state) for model, state in pairs]
            wanted = range(len(each.tokens)) if each.kind == "causal" else [i - shift for i in each.masked if i - shift >= 0]
            kind = "causal" if each.kind == "causal" else "full" if len(each.masked) == len(each.tokens) else "partial"
            rows[kind].append(torch_rows(*(part[list(wanted)] for part in logits), 0.3, info.mask_token))
    rows = {kind: [np.concatenate(parts) for parts in zip(*each, strict=True)] for kind, each in rows.items()}
    block = [np.concatenate(parts) for parts in zip(rows["full"], rows["partial"], strict=True)]
    for kind, (divergence, same, _) in (("causal", rows["causal"]), ("block", block)):
        assert found[kind]["positions"] == len(divergence)
        assert found[kind]["kld_mean"] == pytest.approx(divergence.mean(), rel=0.02)  # keys and values are float16 there
        assert found[kind]["kld_99.9"] == pytest.approx(np.quantile(divergence, 0.999), rel=0.05)
        assert found[kind]["top1"] == pytest.approx(same.mean(), abs=0.02)
    for kind in ("full", "partial"):
        _, same, fixed = rows[kind]
        assert found["flips"][kind]["fixed"] == pytest.approx(fixed.sum(), abs=3) and fixed.sum() > 3
        assert found["flips"][kind]["flipped"] == pytest.approx((fixed & ~same).sum(), abs=3)


def test_a_model_against_itself(text, tmp_path):
    base, _ = model_files.clover()
    same = shutil.copy(base, tmp_path / "same.gguf")
    found = report(base, [same], text, settings=QUICK)
    own, other = found["models"]
    assert own["bytes"] == other["bytes"] == base.stat().st_size
    assert own["causal"] is own["block"] is own["flips"] is own["pass_time"] is own["tasks"] is None
    for kind in ("causal", "block"):
        assert other[kind]["kld_mean"] == other[kind]["kld_99.9"] == 0 and other[kind]["top1"] == 1
        assert other["pass_time"][kind] > 0
    assert other["causal"]["positions"] == 3 * 96
    assert [state["flipped"] for state in other["flips"].values()] == [0, 0]


def test_a_split_model_is_all_its_files(bundled_gguf, text, tmp_path):
    base = bundled_gguf("q8_0")
    convert(BUNDLED, tmp_path / "s.gguf", "q8_0", split_max_size=2_000_000)
    files = sorted(tmp_path.iterdir())
    own, other = report(base, files[:1], text, settings=Settings(context=64, count=1, threads=1))["models"]
    assert len(files) > 2 and other["bytes"] == sum(file.stat().st_size for file in files) > own["bytes"]
    assert other["causal"]["kld_mean"] == 0 and other["bits_per_weight"] == own["bits_per_weight"]


def test_a_model_without_blocks_is_compared_on_causal_passes(text, tmp_path):
    base = model_files.qwen()
    found = report(base, [quantize(base, tmp_path / "q.gguf", "Q8_0")], text, settings=QUICK)["models"][1]
    assert found["block"] is None and found["flips"] is None and found["pass_time"]["block"] is None
    assert 0 < found["causal"]["kld_mean"] < 1
    assert found["bits_per_weight"] < 12


@torch.no_grad()
def test_tasks_are_answered_as_the_reference_decodes(bundled_gguf):
    model = CloverModel.from_pretrained(BUNDLED)
    examples = tasks.held_out("chat", 4, seed="report test")
    given = [{"messages": example.messages, "expected": example.answer} for example in examples]
    given[1]["expected"] += "!"  # not exact
    with Clover(bundled_gguf("f32"), n_threads=1) as clover:
        found = run_tasks(clover, given, clover.info.threshold)
        decoded = [block_decode(model, clover.tokenize(clover.render(task["messages"]))) for task in given]
        said = [clover.detokenize(each.tokens).split("</think>")[-1].strip() for each in decoded]
    assert found["count"] == 4
    assert found["exact"] == np.mean([text == task["expected"] for text, task in zip(said, given, strict=True)])
    assert found["tokens_per_step"] == sum(len(each.tokens) for each in decoded) / sum(each.passes for each in decoded)


@pytest.mark.slow
def test_the_commands_outputs(bundled_gguf, text, tmp_path):
    models = [quantize(bundled_gguf("f32"), tmp_path / f"{kind}.gguf", kind) for kind in ("Q8_0", "Q3_K_M")]
    (example,) = tasks.held_out("tools", 1, seed="report test")
    line = {"messages": example.messages, "tools": example.tools, "thinking": False, "expected": example.answer}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(line) + "\n")
    outputs = {name: tmp_path / f"out.{name}" for name in ("json", "md", "png", "svg")}
    options = ["--text", text, "--chunks", "2", "--context", "128", "--threads", "1"]
    arguments = ["report", bundled_gguf("f32"), *models, *options, "--tasks", tmp_path / "tasks.jsonl"]
    assert command(*arguments, "--json", outputs["json"], "--markdown", outputs["md"], "--plot", outputs["png"]) == ""
    found = json.loads(outputs["json"].read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [entry["file"] for entry in found["models"]] == [bundled_gguf("f32").name, "Q8_0.gguf", "Q3_K_M.gguf"]
    assert str(tmp_path) not in outputs["json"].read_text() + outputs["md"].read_text()
    q8, q3 = found["models"][1:]
    assert q3["bytes"] < q8["bytes"]
    for kind in ("causal", "block"):
        assert q3[kind]["kld_mean"] > q8[kind]["kld_mean"] > 0
    lines = outputs["md"].read_text().splitlines()
    assert len(lines) == 2 + 3 and len({line.count("|") for line in lines}) == 1
    assert outputs["png"].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    table = command(*arguments[:3], *options, "--plot", outputs["svg"])
    assert len(table.splitlines()) == 2 + 2
    assert xml.etree.ElementTree.parse(outputs["svg"]).getroot().tag.endswith("svg")


def test_what_does_not_fit_is_refused_and_named(bundled_gguf, text, tmp_path):
    base, _ = model_files.clover()
    for other, error, message in (
        (model_files.qwen(), ArgumentError, "can_block"),
        (model_files.clover(shift_logits=False)[0], ArgumentError, "shift_logits"),
        (bundled_gguf("f32"), ArgumentError, "not the"),
        (tmp_path / "missing.gguf", ModelFileError, "missing.gguf"),
        (text, ModelFileError, "text.txt"),
    ):
        with pytest.raises(error, match=message) as caught:
            report(base, [other], text, settings=QUICK)
        assert str(other) in str(caught.value)
    for settings, message in (
        (Settings(threshold=1.5), "threshold"),
        (Settings(context=10**6), "longer"),
        (Settings(ratios=()), "rat"),
    ):
        with pytest.raises(ArgumentError, match=message):
            report(base, [base], text, settings=settings)


def test_weights_that_are_not_finite_end_in_one_error(text, tmp_path):
    base, _ = model_files.clover()
    broken = tmp_path / "broken.gguf"
    shutil.copy(base, broken)
    (tensor,) = (t for t in gguf.GGUFReader(broken, "r+").tensors if t.name == "blk.1.ffn_down_shexp.weight")
    tensor.data[:] = np.nan
    with pytest.raises(EngineError, match="broken.gguf.*not finite"):
        report(base, [broken], text, settings=QUICK)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "3",
        "{}",
        '{"messages": []}',
        '{"messages": {}, "expected": "a"}',
        '{"messages": [], "expected": 1}',
        "[" * 10**5,
    ],
)
def test_wrong_tasks_name_the_line(line, tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"messages": [], "expected": "a"}\n' + line + "\n")
    with pytest.raises(ArgumentError, match="line 2"):
        read_tasks(path)


@pytest.mark.slow
def test_commands_fail_in_one_line_and_leave_nothing(text, tmp_path):
    base, _ = model_files.clover()
    arguments = ["report", base, base, "--text", text, "--chunks", "1", "--context", "64", "--threads", "1", "--quiet"]
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    wrong = tmp_path / "wrong.jsonl"
    line = '{"messages": [{"role": "%s", "content": "a"}], "expected": "a"}\n'
    wrong.write_text(line % "user" + line % "nobody")
    for extra, message in (
        (["--tasks", empty], "no tasks"),
        (["--tasks", tmp_path / "missing"], "No such file"),
        (["--tasks", wrong], f"{wrong}: line 2: "),
        (["--json", base], "it is the input"),
        (["--markdown", text], "it is the input"),
        (["--plot", tmp_path / "a.png", "--json", tmp_path / "a.png"], "a.png too"),
        (["--json", tmp_path / "missing" / "a.json"], "no folder"),
        (
            ["--plot", tmp_path / "plot.unknown", "--context", "10000000"],
            f"{tmp_path / 'plot.unknown'}: not the ending of a picture",
        ),
        (["--ratios", "1,2"], "ratios"),
    ):
        said = command(*arguments, *extra, code=1)
        assert message in said and len(said.splitlines()) == 1, said
    assert "--ratios" in command(*arguments, "--ratios", "a", code=2)
    hidden = [
        sys.executable,
        "-c",
        "import sys; sys.modules['matplotlib.figure'] = None; from clover_quant.cli import main; main()",
    ]
    done = subprocess.run([*hidden, *map(str, arguments), "--plot", tmp_path / "a.png"], capture_output=True, text=True)
    assert done.returncode == 1 and "clover-cpp[report]" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.jsonl", "wrong.jsonl"]
