"""Ctrl-C while native code runs: an exception raised inside a callback would be lost, so it waits for the call's end."""

import contextlib
import signal
import threading


@contextlib.contextmanager
def delayed():
    """SIGINT waits until the end of the block (in the main thread; others never get it)."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught = []
    signal.signal(signal.SIGINT, lambda *arguments: caught.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if caught:
        handler(*caught[0])
