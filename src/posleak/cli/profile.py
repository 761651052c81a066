"""`--profile`: where the time and the memory of a command went."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from posleak.stopwatch import OTHER, Stopwatch, stage

if TYPE_CHECKING:
    from posleak.models import Subject

BEFORE = ("start", "load", OTHER)
"""What happens before a measurement: Python starts, torch is imported, the model is read."""


class TimeProfile:
    """Runs a stopwatch during a command, if it is `on`; `measuring` marks the work on a loaded model."""

    def __init__(self, on: bool = True) -> None:
        self.on, self.peak = on, 0
        self.watch = Stopwatch(before=_process_seconds() if on else 0.0)
        self._held = ExitStack()

    def __enter__(self) -> TimeProfile:
        if self.on:
            self._held.enter_context(self.watch)
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @contextmanager
    def measuring(self, subject: Subject) -> Iterator[None]:
        if not self.on:
            yield
            return
        from posleak.models import read_weights
        from posleak.peak import PeakMemory

        read_weights(subject.model)  # or they would count as memory of the measurement
        with stage("measure"), PeakMemory() as peak:
            yield
        self.peak = peak.bytes

    def as_dict(self, planned: int | None) -> dict[str, Any] | None:
        """The JSON of a profile (docs/json.md), None if none was asked for; `planned` bytes, where there was a plan."""
        if not self.on:
            return None
        from posleak.runs.loop import FORWARD

        spent = self.watch.seconds
        forward, measuring = spent.get(FORWARD, 0.0), sum(spent[name] for name in spent if name not in BEFORE)
        return {
            **self.watch.as_dict(),
            "measuring_seconds": measuring,
            "forward_share": forward / measuring if measuring else None,
            "forward_share_of_command": forward / self.watch.total,
            "memory": {"planned_mb": planned and planned / 1e6, "peak_mb": self.peak / 1e6},
        }


def _process_seconds() -> float:
    """How long this process has been running."""
    import psutil

    return max(0.0, time.time() - float(psutil.Process().create_time()))
