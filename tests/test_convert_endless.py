"""FIFOs and devices where a checkpoint should have text files: an error that names the file, at once."""

import os
import shutil

import pytest

from checkpoints import tiny_qwen
from clover_convert import convert
from clover_cpp.errors import CheckpointError

NAMES = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("endless") / "qwen"
    tiny_qwen(folder)
    return folder


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["fifo", "device"])
@pytest.mark.parametrize("name", NAMES)
def test_endless_text_file(original, tmp_path, name, make):
    folder = shutil.copytree(original, tmp_path / "qwen")
    hidden_by = {"model.safetensors.index.json": "model.safetensors", "tokenizer.model": "tokenizer.json"}
    (folder / hidden_by.get(name, name)).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises(CheckpointError, match=f"{name}: not a regular file"):
        convert(folder, tmp_path / "model.gguf")
    assert os.listdir(tmp_path) == ["qwen"]
