"""Progress of long work on standard error, with the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def prompt_progress(console: Console) -> Iterator[Callable[[int, int], None]]:
    """A bar over prompts, where there is a terminal to draw it on; the callback takes (done, of)."""
    counts = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    columns = (*counts, TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("prompts", total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
