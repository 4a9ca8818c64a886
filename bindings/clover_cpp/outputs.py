"""Output files: looked at before any work is done, and written whole or not at all."""

import contextlib
import os
import pathlib
import stat

from .errors import ArgumentError


def check(path, inputs=()):
    """Raise ArgumentError where no file can be written at `path`, a symbolic link followed, or it is one of the files `inputs`."""
    target = pathlib.Path(os.path.realpath(path))
    try:
        found = target.stat()
    except (FileNotFoundError, NotADirectoryError):
        if not target.parent.is_dir():
            raise ArgumentError(f"cannot write {path}: there is no folder {target.parent}") from None
        return
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise ArgumentError(f"cannot write {path}: it is {'a folder' if stat.S_ISDIR(found.st_mode) else 'no regular file'}")
    for file in inputs:
        with contextlib.suppress(OSError):
            if os.path.samestat(found, os.stat(file)):
                raise ArgumentError(f"cannot write {path}: it is the input {file}")


def check_all(paths, inputs=()):
    """`check` each of several outputs, which must also be different files."""
    seen = {}
    for path in paths:
        check(path, inputs)
        other = seen.setdefault(os.path.realpath(path), path)
        if other is not path:
            raise ArgumentError(f"cannot write {path}: it is the output {other} too")


def replace(path, write):
    """Make or replace the file `path` by what the function `write` writes to a path of the same ending beside it.

    Raises ArgumentError where it cannot be written.
    """
    target = pathlib.Path(os.path.realpath(path))
    part = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        write(part)
        os.replace(part, target)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
