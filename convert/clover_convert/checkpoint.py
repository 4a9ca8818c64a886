"""A checkpoint folder: its JSON files and the tensors of its one or many safetensors files."""

import json
import pathlib

from clover_convert.safetensors import SafetensorsFile
from clover_cpp.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Checkpoint:
    """An open checkpoint folder; a context manager. Raises CheckpointError when a file is missing or damaged.

    `config` is config.json as a dict; `tensors` maps the names of the checkpoint to `safetensors.Tensor`.
    """

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        if not self.folder.is_dir():
            raise CheckpointError(f"{self.folder}: {'not a folder' if self.folder.exists() else 'no such folder'}")
        self.files = {}
        self.config = self.json("config.json")
        if self.config is None:
            raise CheckpointError(f"no config.json in {self.folder}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Close all files."""
        for file in self.files.values():
            file.close()

    def text(self, name):
        """The text of a file of the folder, or None when there is none."""
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.folder / name}: {error}") from error

    def json(self, name):
        """A JSON object of the folder as a dict, or None when there is no such file."""
        text = self.text(name)
        if text is None:
            return None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.folder / name}: not valid JSON ({error})") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.folder / name}: not a JSON object")
        return value

    def open_tensors(self):
        """Open the safetensors files and return their tensors by name."""
        if (self.folder / SINGLE).exists():
            return self._open(SINGLE).tensors
        index = self.json(INDEX)
        if index is None:
            raise CheckpointError(f"no {SINGLE} and no {INDEX} in {self.folder}")
        where = index.get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
            raise CheckpointError(f"{self.folder / INDEX}: 'weight_map' must map tensor names to file names")
        tensors = {}
        for name, shard in where.items():
            if shard not in self.files:
                if pathlib.PurePath(shard).name != shard:
                    raise CheckpointError(f"{self.folder / INDEX}: {shard!r} is not a plain file name")
                if not (self.folder / shard).is_file():
                    raise CheckpointError(f"{self.folder / INDEX} names the file {shard}, which is missing")
                self._open(shard)
            if name not in self.files[shard].tensors:
                raise CheckpointError(f"{self.folder / INDEX} places tensor {name!r} in {shard}, which does not have it")
            tensors[name] = self.files[shard].tensors[name]
        return tensors

    def _open(self, name):
        self.files[name] = SafetensorsFile(self.folder / name)
        return self.files[name]
