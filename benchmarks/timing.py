"""Interleaved timing: every case runs once per round, so that a slow period affects all of them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from posleak.stopwatch import finish_devices


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum of n rounds."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Return the median and the range of the values."""
        return cls(float(np.median(values)), min(values), max(values), len(values))


def interleaved(
    work: Mapping[str, Callable[[], Any]], repeats: Mapping[str, int], progress: Callable[[str], None]
) -> dict[str, list[float | None]]:
    """Return the seconds of every case by round, None if it did not run. Every second round has the reverse order."""
    seconds: dict[str, list[float | None]] = {name: [] for name in work}
    for round_ in range(max(repeats.values())):
        for name in list(work) if round_ % 2 == 0 else list(work)[::-1]:
            progress(f"round {round_ + 1}: {name}")
            seconds[name].append(_timed(work[name]) if round_ < repeats[name] else None)
    return seconds


def _timed(work: Callable[[], Any]) -> float:
    """Return the seconds that a call takes, after garbage collection and with finished devices."""
    gc.collect()
    finish_devices()
    start = time.perf_counter()
    work()
    finish_devices()
    return time.perf_counter() - start


def ratios(seconds: list[float | None], base: list[float | None]) -> Spread:
    """Return the spread of the ratios of two cases, each taken within a round."""
    return Spread.of([x / y for x, y in zip(seconds, base, strict=True) if x is not None and y is not None])


def spread(seconds: list[float | None]) -> Spread:
    """Return the spread over the rounds in which a case ran."""
    return Spread.of([x for x in seconds if x is not None])
