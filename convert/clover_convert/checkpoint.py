"""A checkpoint: its JSON files and the tensors of its one or many safetensors files."""

import hashlib
import json
import os
import pathlib
import stat

from clover_convert import hub
from clover_convert.safetensors import SafetensorsFile
from clover_cpp.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Checkpoint:
    """An open checkpoint; a context manager. Raises CheckpointError when a file is missing or damaged.

    source: its folder, or (a string that is no path) its repo id, ORG/NAME or ORG/NAME@REVISION.
    `name` is the folder's or the repository's; `config` is config.json as a dict; `tensors` maps the names of the checkpoint to
    `safetensors.Tensor`.
    """

    def __init__(self, source):
        self.folder = pathlib.Path(source)
        repo = hub.parse(source) if isinstance(source, str) and not os.path.lexists(source) else None
        if repo:
            self.folder = repo.folder()
        try:
            is_folder = stat.S_ISDIR(os.stat(self.folder).st_mode)
        except FileNotFoundError:
            also = ", and it is not a repo id (ORG/NAME)" if isinstance(source, str) else ""
            raise CheckpointError(f"{source}: no such folder{also}") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.folder}: {getattr(error, 'strerror', error)}") from error
        if not is_folder:
            raise CheckpointError(f"{self.folder}: not a folder")
        name = repo.id.partition("/")[2] if repo else self.folder.resolve().name
        self.name = name.encode("utf-8", "replace").decode()  # a folder's name may be any bytes
        self.files, self.tensors = {}, {}
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

    def inputs(self):
        """Paths of the folder's files; GGUF files in it are outputs, unless the index names them."""
        try:
            found = [path for path in self.folder.iterdir() if path.suffix != ".gguf" and path.is_file()]
        except OSError as error:
            raise CheckpointError(f"{self.folder}: {error.strerror}") from error
        return found + [file.path for file in self.files.values()]

    def fingerprint(self):
        """Hex digest that changes when config.json, or any opened safetensors file, does."""
        parts = [json.dumps(self.config, sort_keys=True)]
        parts += [f"{name} {self.files[name].fingerprint()}" for name in sorted(self.files)]
        return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()

    def text(self, name):
        """The text of a file of the folder, or None when there is none."""
        try:
            return self._regular(name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.folder / name}: {error}") from error

    def has(self, name):
        """Whether the folder has a file of this name."""
        return os.path.lexists(self.folder / name)

    def bytes(self, name):
        """The bytes of a file of the folder."""
        try:
            return self._regular(name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{self.folder / name}: {error.strerror}") from error

    def _regular(self, name):
        path = self.folder / name
        if not stat.S_ISREG(os.stat(path).st_mode):  # a FIFO or a device may never end
            raise CheckpointError(f"{path}: not a regular file")
        return path

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
        if not self.tensors:
            self.tensors = self._open_tensors()
        return self.tensors

    def _open_tensors(self):
        if os.path.lexists(self.folder / SINGLE):
            return self._open(SINGLE).tensors
        index = self.json(INDEX)
        if index is None:
            raise CheckpointError(f"no {SINGLE} and no {INDEX} in {self.folder}{self._pickles()}")
        where = index.get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
            raise CheckpointError(f"{self.folder / INDEX}: 'weight_map' must map tensor names to file names")
        for shard in dict.fromkeys(where.values()):
            if pathlib.PurePath(shard).name != shard:
                raise CheckpointError(f"{self.folder / INDEX}: {shard[:100]!r} is not a plain file name")
            if not os.path.isfile(self.folder / shard):
                raise CheckpointError(f"{self.folder / INDEX} names the file {shard[:100]!r}, which is missing")
            self._open(shard)
        for name, shard in where.items():
            if name not in self.files[shard].tensors:
                raise CheckpointError(f"{self.folder / INDEX} places tensor {name[:200]!r} in {shard}, which does not have it")
        for shard, file in self.files.items():
            for name in file.tensors:
                if name not in where:
                    raise CheckpointError(f"{self.folder / INDEX} does not name tensor {name!r}, which {shard} has")
                if where[name] != shard:
                    raise CheckpointError(f"tensor {name!r} is stored twice: in {where[name]} and in {shard}")
        return {name: self.files[shard].tensors[name] for name, shard in where.items()}

    def _pickles(self):
        names = sorted(path.name for path in self.inputs() if path.suffix in PICKLES)
        return f", only pickles ({', '.join(names[:3])}), which can run code and are not read: save as safetensors" if names else ""

    def _open(self, name):
        self.files[name] = SafetensorsFile(self.folder / name)
        return self.files[name]
