"""Progress of long work on standard error, with the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from posleak.runs.watch import Watch


@contextmanager
def prompt_progress(console: Console) -> Iterator[Watch | None]:
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
