"""`--profile`: where the time and the memory of a command went."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posleak.peak import PeakMemory
    from posleak.runs import Run
    from posleak.stopwatch import Stopwatch

BEFORE = ("start", "load", "other")
"""What happens before a measurement: Python starts, torch is imported, the model is read."""


def process_seconds() -> float:
    """How long this process has been running."""
    import psutil

    return max(0.0, time.time() - psutil.Process().create_time())


def profiled(watch: Stopwatch, peak: PeakMemory, run: Run) -> dict[str, Any]:
    """The JSON of a profile (docs/json.md)."""
    from posleak.leakage import FORWARD

    forward = watch.seconds.get(FORWARD, 0.0)
    measuring = sum(spent for name, spent in watch.seconds.items() if name not in BEFORE)
    return {
        **watch.as_dict(),
        "measuring_seconds": measuring,
        "forward_share": forward / measuring if measuring else None,
        "forward_share_of_command": forward / watch.total,
        "memory": {"planned_mb": run.record.get("memory", {}).get("total", 0) / 1e6, "peak_mb": peak.bytes / 1e6},
    }
