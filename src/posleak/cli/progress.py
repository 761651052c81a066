"""Progress of long work on standard error, with the time left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from posleak.runs.watch import Reached, Watch


@contextmanager
def prompt_progress(console: Console) -> Iterator[Watch | None]:
    """A bar over prompts, moving with every layer; None where there is no terminal to draw it on."""
    if not console.is_terminal:
        yield None
        return
    text = TextColumn("{task.description}", markup=False)
    columns = (text, BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("calibrating", total=None)

        def show(reached: Reached) -> None:
            bar.update(task, completed=reached.done, total=reached.of, description=reached.text)

        yield show
