"""Progress on standard error, on a terminal only: a bar with the time left."""

import contextlib
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def bar(name, *columns):
    """A function of (done, total) that shows them on the terminal of standard error, with `columns` after the bar."""
    columns = TextColumn("{task.description}", markup=False), BarColumn(), *columns, TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextlib.contextmanager
def shown(name, quiet=False):
    """A function of (done, total) that shows them, or None where nothing is to be shown."""
    if quiet or not sys.stderr or not sys.stderr.isatty():
        yield None
    else:
        with bar(name, MofNCompleteColumn()) as update:
            yield update
