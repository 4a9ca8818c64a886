"""Interrupted, killed and failing conversions: what stays, what can be resumed, and that the result is the same to the byte."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

from checkpoints import tiny_clover
from clover_convert import convert
from clover_cpp.errors import ArgumentError, ResourceError
from conftest import ROOT

PACKAGES = os.pathsep.join(str(ROOT / part) for part in ("convert", "quant", "bindings"))
PARTIAL = ["m.gguf.partial", "m.gguf.partial.json"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("partial") / "tiny-clover"
    tiny_clover(folder, hidden_size=256)
    return folder


@pytest.fixture(scope="module")
def whole(checkpoint):
    """Bytes of a file by type, made without an interruption."""
    made = {}

    def of(type):
        path = checkpoint.with_suffix(f".{type}.gguf")
        if type not in made:
            convert(checkpoint, path, type)
            made[type] = path.read_bytes()
        return made[type]

    return of


def stop_at(fraction):
    """A progress function that interrupts there."""

    def progress(done, total):
        if done >= fraction * total:
            raise KeyboardInterrupt

    return progress


def interrupted(checkpoint, output, fraction=0.5, **options):
    with pytest.raises(KeyboardInterrupt):
        convert(checkpoint, output, progress=stop_at(fraction), **options)


def child(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": PACKAGES},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


EAGER = """
from clover_convert import chunks, partial
partial.SYNC_SECONDS, chunks.CHUNK = 0, 1 << 14
from clover_convert.cli import main
main()
"""


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("type", ["q8_0", "q4_k_m"])
def test_resumed_is_the_same_to_the_byte(checkpoint, whole, tmp_path, type, fraction):
    interrupted(checkpoint, tmp_path / "m.gguf", fraction, type=type)
    assert sorted(os.listdir(tmp_path)) == PARTIAL
    calls = []
    convert(checkpoint, tmp_path / "m.gguf", type, resume=True, threads=3, progress=lambda *call: calls.append(call))
    assert os.listdir(tmp_path) == ["m.gguf"] and (tmp_path / "m.gguf").read_bytes() == whole(type)
    assert not calls or calls[0][0] > fraction * len(whole(type))


def test_nothing_to_resume(checkpoint, whole, tmp_path):
    convert(checkpoint, tmp_path / "m.gguf", resume=True)
    assert (tmp_path / "m.gguf").read_bytes() == whole("q8_0")
    convert(checkpoint, tmp_path / "m.gguf", resume=True)
    assert os.listdir(tmp_path) == ["m.gguf"]


def test_a_part_is_not_thrown_away_unasked(checkpoint, whole, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"older")
    interrupted(checkpoint, tmp_path / "m.gguf")
    before = (tmp_path / "m.gguf.partial").read_bytes()
    with pytest.raises(ArgumentError, match=r"m.gguf.partial.*--resume, or delete it"):
        convert(checkpoint, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf.partial").read_bytes() == before and (tmp_path / "m.gguf").read_bytes() == b"older"
    (tmp_path / "m.gguf.partial").unlink()  # what the message says suffices
    convert(checkpoint, tmp_path / "m.gguf")
    assert os.listdir(tmp_path) == ["m.gguf"] and (tmp_path / "m.gguf").read_bytes() == whole("q8_0")


def test_resuming_from_something_else_is_refused(checkpoint, tmp_path):
    changed = tmp_path / "changed"
    subprocess.run(["cp", "-rp", checkpoint, changed], check=True)
    interrupted(changed, tmp_path / "m.gguf")
    for options in ({"type": "q4_k"}, {"allow_non_finite": True}, {"split_max_size": 500_000}):
        with pytest.raises(ArgumentError, match="cannot continue .*m.gguf.partial"):
            convert(changed, tmp_path / "m.gguf", resume=True, **options)
    for name in ("model.safetensors", "chat_template.jinja"):
        before, raw = os.stat(changed / name), (changed / name).read_bytes()
        (changed / name).write_bytes(raw if name.endswith("safetensors") else raw + b"{# changed #}")
        with pytest.raises(ArgumentError, match="cannot continue .*m.gguf.partial"):
            convert(changed, tmp_path / "m.gguf", resume=True)
        (changed / name).write_bytes(raw)
        os.utime(changed / name, ns=(before.st_atime_ns, before.st_mtime_ns))
    convert(changed, tmp_path / "m.gguf", resume=True)


@pytest.mark.parametrize(
    "journal",
    [b"", b"{", b"[]", b"{}", b'{"identity": {}, "state": {}, "written": 100}', b'{"identity": {}, "state": {}, "written": "9"}'],
)
def test_damaged_journals(checkpoint, tmp_path, journal):
    interrupted(checkpoint, tmp_path / "m.gguf")
    (tmp_path / "m.gguf.partial.json").write_bytes(journal)
    with pytest.raises(ArgumentError, match="m.gguf.partial.*delete it to start over"):
        convert(checkpoint, tmp_path / "m.gguf", resume=True)


@pytest.mark.parametrize(
    "key, value",
    [("written", 3), ("written", True), ("written", 1.5), ("written", 10**12), ("state", {"not finite": 3}), ("checksum", 0)],
)
def test_changed_journals(checkpoint, tmp_path, key, value):
    interrupted(checkpoint, tmp_path / "m.gguf")
    path = tmp_path / "m.gguf.partial.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ArgumentError, match="m.gguf.partial.*delete it to start over"):
        convert(checkpoint, tmp_path / "m.gguf", resume=True)
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("split", [None, 500_000])
@pytest.mark.parametrize("place", [4, 5000, 400_000, -1])
def test_a_damaged_part_is_not_continued(checkpoint, tmp_path, place, split):
    interrupted(checkpoint, tmp_path / "m.gguf", 0.7, split_max_size=split)
    part = tmp_path / "m.gguf.partial"
    raw = bytearray(part.read_bytes())
    raw[place % len(raw)] ^= 1
    part.write_bytes(raw)
    with pytest.raises(ArgumentError, match="m.gguf.partial or its journal is damaged: delete it to start over"):
        convert(checkpoint, tmp_path / "m.gguf", resume=True, split_max_size=split)
    part.unlink()
    convert(checkpoint, tmp_path / "m.gguf", resume=True, split_max_size=split)
    assert not list(tmp_path.glob("*.partial*"))


def test_a_part_that_lost_its_end(checkpoint, tmp_path):
    interrupted(checkpoint, tmp_path / "m.gguf")
    os.truncate(tmp_path / "m.gguf.partial", 1000)
    with pytest.raises(ArgumentError, match="m.gguf.partial is shorter than .* says"):
        convert(checkpoint, tmp_path / "m.gguf", resume=True)


def test_something_else_under_the_name_of_the_part(checkpoint, tmp_path):
    (tmp_path / "m.gguf.partial").write_bytes(b"mine")
    with pytest.raises(ArgumentError, match="m.gguf.partial is in the way"):
        convert(checkpoint, tmp_path / "m.gguf", resume=True)
    assert (tmp_path / "m.gguf.partial").read_bytes() == b"mine" and os.listdir(tmp_path) == ["m.gguf.partial"]
    (tmp_path / "m.gguf.partial").unlink()
    (tmp_path / "m.gguf.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArgumentError, match="m.gguf.partial is in the way"):
        convert(checkpoint, tmp_path / "m.gguf")
    assert not (tmp_path / "elsewhere").exists()


def test_two_at_once(checkpoint, whole, tmp_path):
    seen = []

    def progress(done, total):
        if not seen:
            with pytest.raises(ResourceError, match="another process is writing .*m.gguf") as caught:
                convert(checkpoint, tmp_path / "m.gguf", resume=True)
            seen.append(caught.value)

    convert(checkpoint, tmp_path / "m.gguf", progress=progress)
    assert seen and (tmp_path / "m.gguf").read_bytes() == whole("q8_0")


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_command_stopped_and_resumed(checkpoint, whole, tmp_path, number, code):
    arguments = [checkpoint, tmp_path / "m.gguf", "--outtype", "iq3_s", "--threads", "1"]
    process = child(EAGER, *arguments)
    until_size(process, tmp_path / "m.gguf.partial", 400_000)
    process.send_signal(number)
    out, error = process.communicate()
    assert process.returncode == code and not out.count("m.gguf: ")
    part = re.escape(str(tmp_path / "m.gguf.partial"))
    assert re.fullmatch(rf"\n?clover-convert: interrupted, what is done is kept in {part}: continue with --resume\n", error), error
    assert sorted(os.listdir(tmp_path)) == PARTIAL
    kept = json.loads((tmp_path / "m.gguf.partial.json").read_text())["written"]
    assert kept == (tmp_path / "m.gguf.partial").stat().st_size and kept >= 400_000 - (1 << 14)  # all but the chunk it was in
    process = child(EAGER, *arguments, "--resume")
    assert process.wait() == 0, process.stderr.read()
    assert os.listdir(tmp_path) == ["m.gguf"] and (tmp_path / "m.gguf").read_bytes() == whole("iq3_s")


def until_size(process, path, size):
    """Wait until a file that a process writes has a size; false when the process ends before."""
    while process.poll() is None:
        if path.exists() and path.stat().st_size >= size:
            return True
        time.sleep(0.001)
    return False


@pytest.mark.slow
def test_killed_five_times(checkpoint, whole, tmp_path):
    size = len(whole("iq3_s"))
    moments = sorted(random.sample(range(size), 5))
    print("killed at bytes", moments)
    kills = 0
    for moment in moments:
        process = child(EAGER, checkpoint, tmp_path / "m.gguf", "--outtype", "iq3_s", "--threads", "2", "--resume")
        if until_size(process, tmp_path / "m.gguf.partial", moment):
            process.kill()
            kills += 1
        process.wait()
        assert not (tmp_path / "m.gguf").exists() or not (tmp_path / "m.gguf.partial").exists()
    assert kills >= 3
    process = child(EAGER, checkpoint, tmp_path / "m.gguf", "--outtype", "iq3_s", "--resume")
    assert process.wait() == 0, process.stderr.read()
    assert os.listdir(tmp_path) == ["m.gguf"] and (tmp_path / "m.gguf").read_bytes() == whole("iq3_s")


# Forks a conversion that kills itself at the n-th of the steps that change files, then one that resumes; for each n at the
# beginning and at the end, and some between.
EVERY_STEP = """
import os, pathlib, shutil, signal, sys
from clover_convert import chunks, convert, partial
partial.SYNC_SECONDS, chunks.CHUNK = 0, 1 << 18
checkpoint, folder, split = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]) or None

def killing(function, countdown):
    def step(*arguments, **options):
        for _ in range(2):  # before it, and after it
            countdown[0] -= 1
            if countdown[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            if _ == 0:
                result = function(*arguments, **options)
        return result
    return step

def forked(work):
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def dying(n):
    countdown = [n]
    convert_with(countdown)
    (folder.parent / "steps").write_text(str(n - countdown[0]))

def convert_with(countdown):
    for name in ("replace", "fsync", "open"):
        setattr(os, name, killing(getattr(os, name), countdown))
    for name in ("write", "_begin", "commit"):
        setattr(partial.Partial, name, killing(getattr(partial.Partial, name), countdown))
    pathlib.Path.unlink = killing(pathlib.Path.unlink, countdown)
    convert(checkpoint, folder / "m.gguf", threads=1, split_max_size=split)

forked(lambda: dying(10**9))
shutil.rmtree(folder)
folder.mkdir()
steps = int((folder.parent / "steps").read_text())
first = None
for n in [*range(1, 30), *range(30, steps - 40, 23), *range(steps - 40, steps + 20)]:
    code = forked(lambda: dying(n))
    if code not in (0, -signal.SIGKILL):
        sys.exit(f"step {n}: exit code {code}")
    if code:
        if forked(lambda: convert(checkpoint, folder / "m.gguf", threads=1, split_max_size=split, resume=True)):
            sys.exit(f"cannot resume after step {n}")
    names = sorted(os.listdir(folder))
    result = names, [(folder / name).read_bytes() for name in names]
    if first not in (None, result):
        sys.exit(f"another result after step {n}: {names}")
    first = result
    shutil.rmtree(folder)
    folder.mkdir()
    if not code and n > steps:
        break
print(steps, "steps;", *names)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("split", [0, 300_000])
def test_killed_at_every_step(tmp_path, split):
    """The result of each is that of the last one, which is not killed."""
    tiny_clover(tmp_path / "m", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    (tmp_path / "out").mkdir()
    process = child(EVERY_STEP, tmp_path / "m", tmp_path / "out", split)
    out, error = process.communicate()
    assert process.returncode == 0, error[-2000:]
    print(out)
    steps, _, *names = out.split()
    assert int(steps) > 50
    assert names == ["m.gguf"] if not split else len(names) > 1 and names[0] == f"m-00001-of-{len(names):05d}.gguf"


@pytest.fixture
def small_disk(tmp_path):
    """A folder that holds 1 MiB, and a function that makes it larger."""

    def mount(options):
        return subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True).returncode

    folder = tmp_path / "disk"
    folder.mkdir()
    if mount("size=1m"):
        pytest.skip("needs the right to mount a tmpfs")
    yield folder, lambda: mount("remount,size=100m")
    subprocess.run(["umount", folder], check=True)


def test_full_disk(checkpoint, whole, small_disk):
    folder, enlarge = small_disk
    process = child(EAGER, checkpoint, folder / "m.gguf", "--outtype", "f16")
    out, error = process.communicate()
    assert process.returncode == 1 and not out
    assert re.fullmatch(r"clover-convert: error: cannot write .*/m.gguf: No space left on device .*--resume\)\n", error), error
    assert sorted(os.listdir(folder)) == PARTIAL
    assert json.loads((folder / "m.gguf.partial.json").read_text())["written"] > 100_000
    assert child(EAGER, checkpoint, folder / "m.gguf", "--outtype", "f16", "--resume").wait() == 1
    assert enlarge() == 0
    process = child(EAGER, checkpoint, folder / "m.gguf", "--outtype", "f16", "--resume")
    assert process.wait() == 0, process.stderr.read()
    assert os.listdir(folder) == ["m.gguf"] and (folder / "m.gguf").read_bytes() == whole("f16")


def test_a_disk_that_is_full_already(checkpoint, small_disk):
    folder, _ = small_disk
    (folder / "other").write_bytes(bytes(1 << 20))
    process = child(EAGER, checkpoint, folder / "m.gguf")
    _, error = process.communicate()
    assert process.returncode == 1 and error.count("\n") == 1 and "No space left on device" in error
    assert os.listdir(folder) == ["other"]
