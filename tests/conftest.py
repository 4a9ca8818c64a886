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
    build = ROOT / "build" / "plain"
    options = ["-DCLOVER_PLAIN=ON", "-DCLOVER_TOOLS=ON", f"-DPython3_EXECUTABLE={sys.executable}", "-Wno-dev"]
    options.append(f"-DCLOVER_LLAMA_SRC:PATH={os.environ.get('CLOVER_LLAMA_SRC', '')}")
    configure = ["cmake", "-S", ROOT / "cpp", "-B", build, "-G", "Ninja", *options]
    for command in (configure, ["ninja", "-C", build, "libraries", "llama-quantize"]):
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            pytest.fail(f"{command[0]}: {result.stdout[-2000:]}{result.stderr[-2000:]}")
    return build


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
