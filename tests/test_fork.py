"""The overlay: what it makes, and how it fails."""

import os
import subprocess
import sys

import pytest

from conftest import ROOT

FORK = ROOT / "cpp" / "fork"
sys.path.insert(0, str(FORK))
import overlay  # noqa: E402
from insertions import INSERTIONS  # noqa: E402


@pytest.fixture
def source(tmp_path):
    """A source tree that holds each anchor once, and little else."""
    for name, anchor, _, _ in INSERTIONS:
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            if anchor not in path.read_text():
                file.write(anchor)
    (tmp_path / "source" / "src" / "llama.cpp").write_text("// llama\n")
    return tmp_path / "source"


def command(*arguments):
    return subprocess.run([sys.executable, FORK / "overlay.py", *arguments], capture_output=True, text=True)


def test_insertions_and_files_arrive(source, tmp_path):
    result = command(tmp_path / "out", "--source", source)
    assert result.returncode == 0, result.stderr
    for name, _, _, ours in INSERTIONS:
        assert ours in (tmp_path / "out" / name).read_text()
        assert ours not in (source / name).read_text()
    assert (tmp_path / "out" / "src" / "models" / "clover.cpp").read_bytes() == (
        FORK / "src" / "models" / "clover.cpp"
    ).read_bytes()


def test_a_second_run_writes_nothing_and_a_file_gone_upstream_goes(source, tmp_path):
    out = tmp_path / "out"
    (source / "src" / "old.cpp").write_text("")
    command(out, "--source", source)
    (out / "notes.txt").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.h")}
    assert before and (out / "src" / "old.cpp").exists()
    (source / "src" / "old.cpp").unlink()
    assert command(out, "--source", source).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*.h")} == before
    assert not (out / "src" / "old.cpp").exists()
    assert (out / "notes.txt").read_text() == "mine"


def test_a_file_that_is_upstreams_again_is_newer_than_what_was_built_of_it(source, tmp_path):
    out = tmp_path / "out"
    command(out, "--source", source)
    changed = out / "src" / "llama.cpp"
    changed.write_text("// as another commit's insertions made it\n")
    os.utime(source / "src" / "llama.cpp", (0, 0))
    os.utime(changed, (1000, 1000))
    command(out, "--source", source)
    assert changed.read_text() == "// llama\n" and changed.stat().st_mtime > 1000


def test_a_folder_of_something_else_is_left_alone(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    result = command(tmp_path / "out", "--source", source)
    assert result.returncode == 1 and str(tmp_path / "out") in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious.txt"]


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("index", range(len(INSERTIONS)))
def test_missing_or_ambiguous_anchor_is_named(index, times, source, tmp_path):
    name, anchor, _, _ = INSERTIONS[index]
    path = source / name
    path.write_text(path.read_text().replace(anchor, "\n" + anchor * times))
    result = command(tmp_path / "out", "--source", source)
    assert result.returncode == 1
    assert name in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_without_llama_cpp_is_refused(tmp_path):
    result = command(tmp_path / "out", "--source", tmp_path)
    assert result.returncode == 1 and str(tmp_path) in result.stderr


def test_a_damaged_source_distribution_is_refused(tmp_path):
    (tmp_path / overlay.SDIST).write_bytes(b"not the file")
    result = command(tmp_path / "llama.cpp")
    assert result.returncode == 1 and "SHA-256" in result.stderr and overlay.SDIST in result.stderr
    assert not (tmp_path / "llama.cpp").exists()
