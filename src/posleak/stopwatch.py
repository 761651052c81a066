"""Profiling by stages: code names its stage, and a running stopwatch adds up the seconds of each stage.

    with Stopwatch() as watch:
        with stage("forward"):
            with stage("rows"):      # counted as rows, not as forward
                ...
    watch.seconds                    # sums to the whole

Without a stopwatch a stage costs a microsecond. At the end of a stage the stopwatch waits for pending work of GPUs, so
that it is counted in the stage that started it.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

OTHER = "other"
"""Stage of the time outside all stages."""

_held: ContextVar[Stopwatch | None] = ContextVar("stopwatch", default=None)


@dataclass
class Stopwatch:
    """Seconds and number of entries of each stage; inner stages are not counted in outer ones.

    before   seconds that the process had run before the stopwatch started; counted as the stage `start`
    inside   the stages that the code is in, innermost last
    """

    before: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    entries: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    inside: list[str] = field(default_factory=list)
    _since: float = 0.0
    _token: Token[Stopwatch | None] | None = None

    def __enter__(self) -> Stopwatch:
        if self.before:
            self.seconds["start"], self.entries["start"] = self.before, 1
        self._since, self.inside, self._token = time.perf_counter(), [OTHER], _held.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.charge()
        if self._token is not None:
            _held.reset(self._token)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def as_dict(self) -> dict[str, Any]:
        """Return total seconds, and seconds, share and entries of each stage."""
        stages = [
            {"stage": name, "seconds": spent, "share": spent / self.total, "entries": self.entries.get(name, 1)}
            for name, spent in self.seconds.items()
        ]
        return {"seconds": self.total, "stages": stages}

    def charge(self) -> None:
        """Add the time since the last change to the innermost stage."""
        finish_devices()
        now = time.perf_counter()
        self.seconds[self.inside[-1]] += now - self._since
        self._since = now


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Count the time inside as stage `name` on the running stopwatch, if any."""
    watch = _held.get()
    if watch is None:
        yield
        return
    watch.charge()
    watch.inside.append(name)
    watch.entries[name] += 1
    try:
        yield
    finally:
        watch.charge()
        watch.inside.pop()


def finish_devices() -> None:
    """Wait for GPUs if torch has been imported and uses one (not tested on a GPU)."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
