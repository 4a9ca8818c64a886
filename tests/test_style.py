"""Formatting and lint rules hold for the whole project."""

import pathlib
import subprocess
import sys

from conftest import ROOT


def tracked(*patterns):
    return subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout.split("\0")[:-1]


def check(tool, *arguments):
    command = [pathlib.Path(sys.executable).with_name(tool), *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_ruff_lint():
    check("ruff", "check", ".")


def test_ruff_format():
    check("ruff", "format", "--check", ".")


def test_clang_format():
    check("clang-format", "--dry-run", "--Werror", *tracked("*.cpp", "*.h", "*.c"))
