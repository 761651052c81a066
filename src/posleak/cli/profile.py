"""The option `--profile`: time by stage and peak memory of a command."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from posleak.stopwatch import OTHER, Stopwatch, stage

if TYPE_CHECKING:
    from posleak.models import Subject

BEFORE_MEASURING = ("start", "load", OTHER)
"""Stages before the measurement: start of Python, import of torch, loading of the model."""


class TimeProfile:
    """A stopwatch that runs during a command if it is `on`; `measuring` marks the work on a loaded model."""

    def __init__(self, on: bool = True) -> None:
        self.on, self.peak = on, 0
        self.watch = Stopwatch(before=_process_seconds() if on else 0.0)
        self._running = ExitStack()

    def __enter__(self) -> TimeProfile:
        if self.on:
            self._running.enter_context(self.watch)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

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


def _process_seconds() -> float:
    """Return the age of this process."""
    import psutil

    return max(0.0, time.time() - float(psutil.Process().create_time()))
