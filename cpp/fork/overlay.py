"""Make the fork's source tree: llama.cpp as released, with our files added and our insertions made.

    overlay.py OUTPUT [--source DIR] [--plain]

Without --source, llama.cpp is taken from the pinned source distribution of llama-cpp-python, fetched by
pip and checked against its SHA-256. --plain leaves the tree unmodified: the outside check of the tests. Only files whose
content changes are written, so that a build in OUTPUT stays incremental.
"""

import argparse
import filecmp
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
from insertions import AFTER, INSERTIONS  # noqa: E402

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
SDIST = f"llama_cpp_python-{VERSION}.tar.gz"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
INSIDE = f"llama_cpp_python-{VERSION}/vendor/llama.cpp"
MANIFEST = ".overlay"  # in the tree made: the names of its files
PARTS = ("CMakeLists.txt", "LICENSE", "cmake", "common", "ggml", "include", "licenses", "src", "tools/quantize", "vendor")


class OverlayError(Exception):
    """The fork cannot be made; the message says why."""


def sha256(path):
    """SHA-256 of a file as hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(folder):
    """Path of the pinned source distribution in `folder`, fetched if it is not there, checked in any case."""
    path = folder / SDIST
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"fetching {PACKAGE} {VERSION} (its source distribution holds llama.cpp)", flush=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", PACKAGE, "-d", temporary]
            result = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], capture_output=True, text=True)
            if result.returncode or not (pathlib.Path(temporary) / SDIST).exists():
                raise OverlayError(f"could not fetch {PACKAGE} {VERSION}: {result.stderr.strip()}")
            os.replace(pathlib.Path(temporary) / SDIST, path)
    if sha256(path) != SHA256:
        raise OverlayError(f"{path} has not the SHA-256 recorded in {pathlib.Path(__file__).name}: damaged, or another file")
    return path


def unpack(sdist, folder):
    """Unpack the llama.cpp of the source distribution into `folder`, whole or not at all."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        with tarfile.open(sdist) as archive:
            wanted = tuple(f"{INSIDE}/{part}" for part in PARTS)
            members = [m for m in archive if m.name in wanted or m.name.startswith(tuple(w + "/" for w in wanted))]
            checked = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
            archive.extractall(temporary, members=members, **checked)
        os.rename(pathlib.Path(temporary) / INSIDE, folder)


def insert(text, anchor, where, ours, name):
    """`text` with `ours` inserted before or after `anchor`, which must occur exactly once."""
    count = text.count(anchor)
    if count != 1:
        shown = anchor.strip().splitlines()[0]
        raise OverlayError(
            f"{name}: the anchor {shown!r} occurs {count} times instead of once; this llama.cpp is not one the fork fits"
        )
    at = text.index(anchor) + (len(anchor) if where == AFTER else 0)
    return text[:at] + ours + text[at:]


def changed_files(source):
    """What the fork adds to or changes in llama.cpp at `source`: {relative path: content}."""
    result = {}
    for name, anchor, where, ours in INSERTIONS:
        path = source / name
        if name not in result:
            if not path.is_file():
                raise OverlayError(f"{source} has no {name}: not a llama.cpp the fork fits")
            result[name] = path.read_text(encoding="utf-8")
        result[name] = insert(result[name], anchor, where, ours, name)
    for path in sorted((HERE / "src").rglob("*")):
        name = path.relative_to(HERE).as_posix()
        if path.is_file():
            if (source / name).exists():
                raise OverlayError(f"{name} exists in llama.cpp already")
            result[name] = path.read_text(encoding="utf-8")
    return result


def source_files(source):
    """Relative paths of llama.cpp's files that the build needs."""
    for part in PARTS:
        path = source / part
        yield from ([path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()))


def write(source, output, changes):
    """Make `output` the source tree with `changes`; files that are right already keep their time stamps, old ones go."""
    made = output / MANIFEST
    if output.exists() and any(output.iterdir()) and not made.exists():
        raise OverlayError(f"{output} is not empty, and was not made by {pathlib.Path(__file__).name}: nothing is touched there")
    old = set(made.read_text(encoding="utf-8").splitlines()) if made.exists() else set()
    files = {path.relative_to(source).as_posix(): path for path in source_files(source)}
    output.mkdir(parents=True, exist_ok=True)
    made.write_text("\n".join(sorted(old | files.keys() | changes.keys())), encoding="utf-8")
    for name, path in files.items():
        target = output / name
        if name not in changes and not (target.exists() and filecmp.cmp(path, target, shallow=False)):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)  # with a new time stamp: what was built of its predecessor is out of date
    for name, content in changes.items():
        target = output / name
        if not target.exists() or target.read_text(encoding="utf-8") != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(content, encoding="utf-8")
    for name in old - files.keys() - changes.keys():
        (output / name).unlink(missing_ok=True)
    made.write_text("\n".join(sorted(files.keys() | changes.keys())), encoding="utf-8")


def make(output, source, plain):
    """Make the source tree at `output`; `source` None: the pinned source distribution, kept beside `output`."""
    output.parent.mkdir(parents=True, exist_ok=True)
    if source is None:
        source = output.parent / f"llama.cpp-{VERSION}"
        if not source.exists():
            unpack(fetch(output.parent), source)
    elif not (source / "src" / "llama.cpp").is_file():
        raise OverlayError(f"{source} holds no llama.cpp (no src/llama.cpp in it)")
    write(source, output, {} if plain else changed_files(source))


def main():
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--source", type=pathlib.Path)
    parser.add_argument("--plain", action="store_true")
    args = parser.parse_args()
    try:
        make(args.output.resolve(), args.source and args.source.resolve(), args.plain)
    except OverlayError as error:
        sys.exit(f"overlay: error: {error}")


if __name__ == "__main__":
    main()
