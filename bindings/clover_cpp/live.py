"""The live view of a terminal: undecided positions as dim blocks that turn into text."""

from rich.console import Console
from rich.live import Live
from rich.text import Text as Line

from .command import printable
from .events import Step

MASKED = "░"


class View:
    """What is on the screen: `text`, final, and the open block's positions after it."""

    def __init__(self, detokenize):
        self.detokenize = detokenize
        self.text = ""
        self.block = []

    def update(self, event):
        """Take in a `Step` or `Text`."""
        if not isinstance(event, Step):
            self.text += printable(event.text, keep="\n\t")
            return
        if event.step <= 1 and len(event.positions) and self._is_new(event):
            self.block = [None] * event.block_size
            self.start = event.start
        for position, token in zip(event.positions, event.tokens, strict=True):
            self.block[position] = token

    def _is_new(self, event):
        return not self.block or self.start != event.start

    def take_lines(self):
        """The finished lines of the text, which leave the view."""
        done, newline, self.text = self.text.rpartition("\n")
        return done + newline

    def __rich__(self):
        line = Line(self.text)
        first = self.block.index(None) if None in self.block else len(self.block)  # before it, all is in the text
        for token in self.block[first:]:
            piece = MASKED if token is None else printable(self.detokenize([token]), keep="\n\t").replace("\n", "⏎")
            line.append(piece, style="dim" if token is None else "green")
        return line


def show(clover, events):
    """Print an answer's events to the terminal."""
    console = Console(highlight=False, markup=False)
    view = View(clover.detokenize)
    with Live(view, console=console, auto_refresh=False, transient=True, vertical_overflow="visible") as live:
        for event in events:
            view.update(event)
            if done := view.take_lines():
                console.print(Line(done), end="")
            live.refresh()
    if view.text:
        console.print(Line(view.text))
