"""Progress bars on standard error, and the option `--profile`: time by stage and peak memory of a command."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from posleak.stopwatch import OTHER, Stopwatch, stage
from posleak.text import visible

if TYPE_CHECKING:
    from posleak.models import Subject
    from posleak.runs.progress import OnProgress

BEFORE_MEASURING = ("start", "load", OTHER)
"""Stages before the measurement: start of Python, import of torch, loading of the model."""


@contextmanager
def prompt_progress(console: Console) -> Iterator[OnProgress | None]:
    """Show a bar over prompts that moves with every layer; yield its callback, or None without a terminal."""
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


class TimeProfile:
    """Time by stage and peak memory of a command, recorded if `on`; `measuring` marks the work on a loaded model."""

    def __init__(self, on: bool = True) -> None:
        self.on, self.watch, self.peak = on, Stopwatch(), 0

    def __enter__(self) -> TimeProfile:
        if self.on:
            self.watch.before = _age()
            self.watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self.on:
            self.watch.__exit__()

    @contextmanager
    def measuring(self, subject: Subject) -> Iterator[None]:
        """Record time and peak memory of the work inside, above the loaded model."""
        if not self.on:
            yield
            return
        from posleak.models import read_weights
        from posleak.peak import PeakMemory

        read_weights(subject.model)  # memory-mapped weights would count as memory of the measurement
        with stage("measure"), PeakMemory() as peak:
            yield
        self.peak = peak.bytes

    def as_dict(self, planned: int | None) -> dict[str, Any] | None:
        """Return the JSON of the profile (docs/json.md), None if it is off. `planned`: bytes of the memory plan."""
        if not self.on:
            return None
        from posleak.runs.loop import FORWARD

        seconds = self.watch.seconds
        forward = seconds.get(FORWARD, 0.0)
        measuring = sum(spent for name, spent in seconds.items() if name not in BEFORE_MEASURING)
        return {
            **self.watch.as_dict(),
            "measuring_seconds": measuring,
            "forward_share": forward / measuring if measuring else None,
            "forward_share_of_command": forward / self.watch.total,
            "memory": {"planned_mb": planned and planned / 1e6, "peak_mb": self.peak / 1e6},
        }


def _age() -> float:
    """Return the age of this process."""
    import psutil

    return max(0.0, time.time() - float(psutil.Process().create_time()))
