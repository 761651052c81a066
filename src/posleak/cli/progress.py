"""Progress bars on standard error."""

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
    """Show a bar over prompts that moves with every layer; yield its callback, None without a terminal."""
    if not console.is_terminal:
        yield None
        return
    with bar(console, "calibrating") as update:
        yield lambda progress: update(progress.text, progress.done, progress.of)


@contextmanager
def bar(console: Console, text: str = "") -> Iterator[Callable[[str, float, float], None]]:
    """Show a bar; yield a function of its text, the amount done and the total."""
    description = TextColumn("{task.description}", markup=False)
    columns = (description, BarColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(text, total=None)
        yield lambda text, done, of: progress.update(task, completed=done, total=of, description=text)


@contextmanager
def board_view(console: Console) -> Iterator[Callable[[str, int, int, Sequence[str]], None]]:
    """Show a bar with a text and lines below it, each cut to the width of the terminal.

    Yield a function of the text, the number of items done, the total and the lines.
    """
    progress = Progress(BarColumn(24), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    task = progress.add_task("starting", total=None)
    with Live(progress, console=console, transient=True, refresh_per_second=4) as live:

        def show(text: str, done: int, of: int, lines: Sequence[str]) -> None:
            progress.update(task, completed=done, total=of, description=text)
            below = [Text(f"  {visible(line)}", style="dim", no_wrap=True, overflow="ellipsis") for line in lines]
            live.update(Group(progress, *below))

        yield show
