"""Output files that appear only when they are whole, and whose beginning survives an interruption.

Beside the output NAME lie, until it is whole, `NAME.partial` (a model of several files has also `NAME.partial.2` and so on) and the
journal `NAME.partial.json`: what the files were made from, how many of their bytes are surely on disk, and a checksum of all that.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import pathlib
import stat
import time
import zlib

from clover_cpp import outputs
from clover_cpp.errors import ArgumentError, ResourceError

try:
    import fcntl
except ImportError:  # Windows: no lock
    fcntl = None

LONGEST_NAME = 200  # bytes; longer ones are shortened, so that the suffixes fit into the 255 that file systems allow
SYNC_SECONDS = 3
SYNC_BYTES = 256 << 20
READ_BYTES = 1 << 20


def partial_path(output):
    """Where the unfinished output is; a symbolic link is followed."""
    target = pathlib.Path(os.path.realpath(output))
    name, raw = target.name, os.fsencode(target.name)
    if LONGEST_NAME < len(raw) <= 255:
        name = os.fsdecode(raw[:50]) + "-" + hashlib.sha256(raw).hexdigest()[:16]
    return target.with_name(name + ".partial")


class Partial:
    """The unfinished files of one output; the process that has it holds a lock.

    output: path of the whole. targets, sizes: final paths of its files, and bytes of each. identity: what the files are made from,
    a dict of strings. state: a dict for the journal, of the caller's. inputs: files that must not be written over.
    After construction, `written` bytes of all files (one after the other) are there already: give `write` the rest, then `commit`.
    Raises ArgumentError for an output that cannot be, and where an earlier run left a part and `resume` is not set, or the part is
    damaged or was made from something else; ResourceError when writing fails or another process writes the same output.
    """

    def __init__(self, output, targets, sizes, identity, resume=False, inputs=()):
        self.output = output
        self.sizes = sizes
        self.identity = identity
        self.state = {}
        self._done = 0, 0  # bytes written and their checksum; one attribute, so that an interruption cannot part them
        self._files = []
        self._syncing = None
        self._synced = time.monotonic(), 0
        self.targets = targets
        outputs.check_all(self.targets, inputs)
        with self._errors():
            self.path = partial_path(output)
            self.journal = self.path.with_name(self.path.name + ".json")
            self._new_journal = self.path.with_name(self.path.name + ".json.new")
            self.paths = [self._numbered(i) for i in range(1, len(targets) + 1)]
            self._lock = self._take_lock()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "sync")
        try:
            with self._errors():
                self._begin(resume)
        except BaseException:
            if not os.fstat(self._lock).st_size and not self.journal.exists():
                self.path.unlink()  # nothing was begun
            self.close()
            raise

    @property
    def written(self):
        """Bytes of all files that are there."""
        return self._done[0]

    def _numbered(self, number):
        return self.path if number == 1 else self.path.with_name(f"{self.path.name}.{number}")

    @contextlib.contextmanager
    def _errors(self, note=""):
        try:
            yield
        except OSError as error:
            raise ResourceError(f"cannot write {self.output}: {error.strerror or error}{note}") from error

    def _take_lock(self):
        if os.path.lexists(self.path) and not stat.S_ISREG(self.path.lstat().st_mode):
            raise ArgumentError(f"{self.path} is in the way: it is no regular file")
        while True:
            lock = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
            try:
                if fcntl:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), os.stat(self.path)):
                    return lock
            except BlockingIOError:
                os.close(lock)
                raise ResourceError(f"another process is writing {self.output}") from None
            except FileNotFoundError:
                pass  # its owner finished and moved it away
            os.close(lock)

    def _begin(self, resume):
        journal, size = self._read_journal(), os.fstat(self._lock).st_size
        if not size:  # new; a journal beside it is left from a run that was killed after its files had got their final names
            self._write_journal()
        elif journal is None:
            raise ArgumentError(f"{self.path} is in the way, and {self.journal.name} does not describe it: delete it to start over")
        elif not resume:
            raise ArgumentError(f"an earlier run left {self.path}: continue it with --resume, or delete it to start over")
        else:
            self._check_identity(journal["identity"])
            self.state, self._done = journal["state"], (journal["written"], 0)
        left = self.written
        for path, size in zip(self.paths, self.sizes, strict=True):
            here = min(left, size)
            left -= here
            if self.written == sum(self.sizes) and not path.exists():
                continue  # moved to its final name already
            file = open(path, "r+b" if path.exists() else "x+b", buffering=0)  # noqa: SIM115
            self._files.append(file)
            if os.fstat(file.fileno()).st_size < here:
                raise ArgumentError(f"{path} is shorter than {self.journal.name} says: delete it to start over")
            file.truncate(here)
            file.seek(here)
        if self.written:
            self._check_part(journal)

    def _check_part(self, journal):
        left, checksum = self.written, 0
        for path in self.open_paths():
            with open(path, "rb") as file:
                while data := file.read(min(left, READ_BYTES)):
                    checksum = zlib.crc32(data, checksum)
                    left -= len(data)
        self._done = self.written, checksum
        if journal["checksum"] != self._sum():
            raise ArgumentError(f"{self.path} or its journal is damaged: delete it to start over")

    def _position(self):
        """(number of the file that the next byte goes to, bytes it has)."""
        left = self.written
        for number, size in enumerate(self.sizes):
            if left < size:
                return number, left
            left -= size
        return len(self.sizes), 0

    def _check_identity(self, identity):
        differ = [key for key in {**self.identity, **identity} if self.identity.get(key) != identity.get(key)]
        if differ:
            raise ArgumentError(f"cannot continue {self.path}: {' and '.join(differ)} changed since: delete it to start over")

    def _read_journal(self):
        try:
            journal = json.loads(self.journal.read_bytes())
            whole = isinstance(journal["identity"], dict) and isinstance(journal["state"], dict) and type(journal["written"]) is int
            return journal if whole and 0 <= journal["written"] <= sum(self.sizes) and "checksum" in journal else None
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def _write_journal(self):
        self._replace_journal(self._journal_text())

    def _journal_text(self):
        return json.dumps({"identity": self.identity, "written": self.written, "state": self.state, "checksum": self._sum()})

    def _sum(self):
        """Checksum of the bytes written and of the state."""
        written, checksum = self._done
        return zlib.crc32(json.dumps([written, self.state]).encode(), checksum)

    def _replace_journal(self, text):
        try:
            with open(self._new_journal, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._new_journal, self.journal)
        except OSError:
            with contextlib.suppress(OSError):
                self._new_journal.unlink()
            raise

    def write(self, data):
        """Add bytes, which must not go beyond the file that they begin in."""
        with self._write_errors():
            number, length = self._position()
            view = memoryview(data).cast("B")
            assert length + len(view) <= self.sizes[number], (number, length, len(view))
            left = view
            while left:
                left = left[self._files[number].write(left) :]
            written, checksum = self._done
            self._done = written + len(view), zlib.crc32(view, checksum)

    def _write_errors(self):
        return self._errors(f" (the part written so far is kept in {self.path}: continue with --resume)")

    def sync_if_due(self):
        """From time to time, begin to bring what is written to disk and to note it in the journal, with the present `state`."""
        with self._write_errors():
            self._begin_sync()

    def _begin_sync(self):
        if self._syncing and self._syncing.done():
            self._syncing.result()
            self._syncing = None
        seconds, written = self._synced
        due = self.written - written >= SYNC_BYTES or time.monotonic() - seconds >= SYNC_SECONDS
        if due and not self._syncing:
            self._synced = time.monotonic(), self.written
            self._syncing = self._thread.submit(self._sync, self._journal_text())

    def _sync(self, text):
        for file in self._files:
            os.fsync(file.fileno())
        self._replace_journal(text)

    def keep(self):
        """Bring what is there to disk, as far as possible, for a later run to continue; nothing is kept of nothing."""
        if not self.written:
            return self.discard()
        with contextlib.suppress(OSError, ResourceError):
            number, length = self._position()
            if number < len(self._files):
                self._files[number].truncate(length)  # on a full disk it makes room for the journal
            self.flush()

    def _settle(self):
        """Wait for the thread, which may be about to write the journal."""
        self._thread.submit(lambda: None).result()

    def flush(self):
        """Bring all that is written to disk."""
        with self._errors():
            self._settle()
            for file in self._files:
                os.fsync(file.fileno())
            self._write_journal()

    def commit(self):
        """Give the whole files their final names."""
        assert self.written == sum(self.sizes), (self.written, self.sizes)
        with self._errors(f" (it is whole in {self.path}: continue with --resume)"):
            self.flush()
            for path, target in reversed(list(zip(self.paths, self.targets, strict=True))):
                if path.exists():  # the first file last: it holds the lock
                    os.replace(path, target)
            _sync_folder(self.path.parent)
            self._new_journal.unlink(missing_ok=True)
            self.journal.unlink(missing_ok=True)

    def open_paths(self):
        """Where the unfinished files are, first to last."""
        return [path if path.exists() else target for path, target in zip(self.paths, self.targets, strict=True)]

    def discard(self):
        """Delete the unfinished files."""
        self._settle()
        for path in [*reversed(self.paths), self._new_journal, self.journal]:
            with contextlib.suppress(OSError):
                path.unlink()

    def close(self):
        """Close the files and give the lock back."""
        self._thread.shutdown()
        for file in self._files:
            file.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _sync_folder(path):
    with contextlib.suppress(OSError):  # not every system can
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
