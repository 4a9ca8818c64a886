"""What several tests share: where the native libraries are, and converted models."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
BUNDLED = ROOT / "models" / "clover-tiny"

# Background jobs start with Ctrl-C ignored, those of nohup with the hang-up, and children inherit that: the tests send both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


CONVERTER = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in ("convert", "quant", "bindings"))}


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory):
    """A folder with the random checkpoints `qwen` and `clover`: float32, one tensor for each expert. Not to be changed."""
    from checkpoints import tiny_clover, tiny_qwen

    folder = tmp_path_factory.mktemp("checkpoints")
    tiny_qwen(folder / "qwen")
    tiny_clover(folder / "clover")
    return folder


@pytest.fixture(scope="session")
def library():
    """Folder of the fork's libraries."""
    folder = ROOT / "build" / "lib"
    if not any(folder.glob("libclover.*")):
        pytest.exit("the native libraries are not built: run ./scripts/test", returncode=1)
    os.environ["CLOVER_LIB_PATH"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def plain_build():
    """Build folder of an unmodified llama.cpp from the same source: its libraries and llama-quantize."""
    command = 'set -e; source "$1/scripts/setup.sh"; python=$2; setup_plain'
    result = subprocess.run(["bash", "-c", command, "setup", ROOT, sys.executable], capture_output=True, text=True)
    if result.returncode:
        pytest.fail(f"{result.stdout[-2000:]}{result.stderr[-2000:]}")
    return ROOT / "build" / "plain"


@pytest.fixture(scope="session")
def plain_library(plain_build):
    """Folder of an unmodified llama.cpp's libraries."""
    return plain_build / "lib"


@pytest.fixture(scope="session")
def plain_quantize(plain_build):
    """An unmodified llama.cpp's llama-quantize."""
    return plain_build / "bin" / "llama-quantize"


@pytest.fixture(scope="session")
def bundled_gguf(tmp_path_factory):
    """The bundled model as GGUF: a function of the type."""
    from clover_convert import convert

    folder, made = tmp_path_factory.mktemp("bundled"), {}

    def of(kind):
        if kind not in made:
            made[kind] = folder / f"clover-tiny-{kind}.gguf"
            convert(BUNDLED, made[kind], type=kind)
        return made[kind]

    return of
