"""Conversion of a checkpoint to Q4_K_M: clover-convert against an unmodified llama.cpp's two steps, in turn.

Upstream's way is convert_hf_to_gguf.py to a BF16 file, then llama-quantize. For each command: wall seconds, peak memory (resident
set), and bytes left on the disk at the most. `ratio` is clover-convert's seconds over upstream's two steps: below 1 is faster.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import time

from . import slice35b

ROOT = pathlib.Path(__file__).parents[2]
PLAIN = ROOT / "build" / "plain"
WORK = ROOT / "build" / "bench"

# The slice has a small tokenizer padded to the vocabulary's size; upstream knows tokenizers by a hash of what they produce.
UPSTREAM = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen35"
sys.argv[:] = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def upstream_converter():
    """Folder of convert_hf_to_gguf.py and its modules, unpacked from the source that the unmodified build was made of."""
    folder = WORK / "upstream"
    if not (folder / "convert_hf_to_gguf.py").is_file():
        (archive,) = PLAIN.glob("llama_cpp_python-*.tar.gz")
        with tarfile.open(archive) as tar:
            for member in tar:
                name = member.name.partition("/vendor/llama.cpp/")[2]
                if member.isfile() and name.startswith(("convert_hf_to_gguf.py", "conversion/", "gguf-py/")):
                    target = folder / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(tar.extractfile(member).read())
    return folder


def timed(command, **options):
    """Run a command: (wall seconds, peak resident bytes). SystemExit with its output if it fails."""
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=subprocess.STDOUT, **options)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            log.seek(0)
            sys.exit(f"{command[0]} failed:\n{log.read()[-3000:].decode(errors='replace')}")
    return seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def ours(checkpoint, folder, outtype):
    """clover-convert, one step."""
    output = folder / "ours.gguf"
    seconds, memory = timed([sys.executable, "-m", "clover_convert", checkpoint, output, "--outtype", outtype, "--quiet"])
    size = output.stat().st_size
    output.unlink()
    return {"seconds": seconds, "peak_memory": memory, "peak_disk": size, "bytes": size}


def theirs(checkpoint, folder, outtype):
    """convert_hf_to_gguf.py, then llama-quantize."""
    source = upstream_converter()
    full, output = folder / "full.gguf", folder / "theirs.gguf"
    command = [sys.executable, "-c", UPSTREAM, source, source / "convert_hf_to_gguf.py"]
    convert, memory = timed([*command, checkpoint, "--no-mtp", "--outtype", "bf16", "--outfile", full])
    quantize, more = timed([PLAIN / "bin" / "llama-quantize", full, output, outtype])
    size, scratch = output.stat().st_size, full.stat().st_size
    full.unlink()
    output.unlink()
    figures = {"seconds": convert + quantize, "convert_seconds": convert, "quantize_seconds": quantize}
    return {**figures, "peak_memory": max(memory, more), "peak_disk": size + scratch, "bytes": size}


def main():
    """Command line of scripts/bench convert."""
    parser = argparse.ArgumentParser(prog="scripts/bench convert", description=__doc__)
    parser.add_argument("--checkpoint", type=pathlib.Path, help="default: a slice of the 35B-A3B shape, made in build/bench")
    parser.add_argument("--layers", type=int, default=4, help="of the slice")
    parser.add_argument("--outtype", default="q4_k_m")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    checkpoint = args.checkpoint or WORK / f"slice-{args.layers}"
    if not checkpoint.exists():
        print(f"making {checkpoint}", file=sys.stderr)
        slice35b.make(checkpoint, args.layers, "qwen")
    WORK.mkdir(parents=True, exist_ok=True)
    results = {"ours": [], "upstream": []}
    with tempfile.TemporaryDirectory(dir=WORK) as folder:
        for _ in range(args.runs):
            for name, measure in (("upstream", theirs), ("ours", ours)):
                results[name].append(measure(checkpoint, pathlib.Path(folder), args.outtype))
                print(name, {key: round(value, 1) for key, value in results[name][-1].items()}, file=sys.stderr)
    best = {name: min(runs, key=lambda run: run["seconds"]) for name, runs in results.items()}
    ratio = best["ours"]["seconds"] / best["upstream"]["seconds"]
    if args.json:
        print(json.dumps({"outtype": args.outtype, "ratio": ratio, "runs": results}))
        return
    for name, run in best.items():
        memory, disk = run["peak_memory"] / 1e9, run["peak_disk"] / 1e9
        print(
            f"{name:9} {run['seconds']:7.1f} s, peak memory {memory:.2f} GB, disk {disk:.2f} GB, file {run['bytes'] / 1e9:.2f} GB"
        )
    print(f"clover-convert's time / upstream's: {ratio:.2f}")


if __name__ == "__main__":
    main()
