"""Progress of a conversion on standard error: a bar with rate and time left on a terminal, else a line now and then."""

import contextlib
import sys
import time

from rich.progress import DownloadColumn, TransferSpeedColumn

from clover_quant.progress import bar

SECONDS = 15  # between lines


@contextlib.contextmanager
def shown(name, quiet=False):
    """A function of (bytes done, bytes in all) that shows them, or None where nothing is to be shown."""
    if quiet:
        yield None
    elif not sys.stderr.isatty():
        yield _Lines(name)
    else:
        with bar(name, DownloadColumn(), TransferSpeedColumn()) as update:
            yield update


class _Lines:
    def __init__(self, name):
        self.name = name
        self.begun = self.last = time.monotonic()
        self.first = None

    def __call__(self, done, total):
        now = time.monotonic()
        if self.first is None:
            self.first = done
        if now - self.last < SECONDS or done == self.first:
            return
        self.last = now
        rate = (done - self.first) / (now - self.begun)
        left = (total - done) / rate
        print(f"{self.name}: {done / total:.0%}, {rate / 1e6:.0f} MB/s written, {left:.0f} s left", file=sys.stderr, flush=True)
