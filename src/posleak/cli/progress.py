"""Progress of long work on standard error, with the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from posleak.text import visible

if TYPE_CHECKING:
    from posleak.runs.progress import OnProgress


@contextmanager
def prompt_progress(console: Console) -> Iterator[OnProgress | None]:
    """A bar over prompts, moving with every layer; None where there is no terminal to draw it on."""
    if not console.is_terminal:
        yield None
        return
    with bar(console, "calibrating") as show:
        yield lambda reached: show(reached.text, reached.done, reached.of)


@contextmanager
def bar(console: Console, text: str = "") -> Iterator[Callable[[str, float, float], None]]:
    """A bar; gives a function of what is done now, how much of it, and of how much."""
    said = TextColumn("{task.description}", markup=False)
    columns = (said, BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as drawn:
        task = drawn.add_task(text, total=None)
        yield lambda what, done, of: drawn.update(task, completed=done, total=of, description=what)


@contextmanager
def board_view(console: Console) -> Iterator[Callable[[str, int, int, Sequence[str]], None]]:
    """A bar with a text behind it, and lines below; gives a function of the text, how much is done of how much, and the
    lines, each cut to the width of the terminal."""
    counted = Progress(BarColumn(24), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    task = counted.add_task("starting", total=None)
    with Live(counted, console=console, transient=True, refresh_per_second=4) as live:

        def show(text: str, done: int, of: int, lines: Sequence[str]) -> None:
            counted.update(task, completed=done, total=of, description=text)
            below = [Text(f"  {visible(line)}", style="dim", no_wrap=True, overflow="ellipsis") for line in lines]
            live.update(Group(counted, *below))

        yield show
