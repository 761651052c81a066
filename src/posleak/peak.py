"""The most memory that a piece of work held at one time, above what was there before it.

    with PeakMemory() as peak:
        ...
    peak.bytes

On Linux the kernel keeps the largest resident size and can be told to start anew; elsewhere it is sampled. On a GPU it
is what torch's allocator handed out (untested: no machine of ours has one).

Weights are mapped from their file and enter memory when they are first read. Call `posleak.models.read_weights` before,
or they count towards the peak.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import psutil

STATUS, REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")
EVERY = 0.005
"""Seconds between samples, where sampling is needed."""


class PeakMemory:
    """`bytes` [int]: peak minus start, of main memory and of GPUs together; known when the context is left."""

    def __init__(self) -> None:
        self.bytes = 0
        self._sampler: Sampler | None = None

    def __enter__(self) -> PeakMemory:
        self._before = psutil.Process().memory_info().rss
        if not _forget_peak():
            self._sampler = Sampler()
            self._sampler.start()
        self._gpus = _gpu_bytes(start=True)
        return self

    def __exit__(self, *_: object) -> None:
        peak = _kernel_peak() if self._sampler is None else self._sampler.finish()
        self.bytes = max(0, peak - self._before) + max(0, _gpu_bytes() - self._gpus)


class Sampler(threading.Thread):
    """Looks at the resident size again and again, and keeps the largest."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._over = 0, threading.Event()

    def run(self) -> None:
        process = psutil.Process()
        while not self._over.is_set():
            self.peak = max(self.peak, process.memory_info().rss)
            self._over.wait(EVERY)

    def finish(self) -> int:
        self._over.set()
        self.join()
        return max(self.peak, int(psutil.Process().memory_info().rss))


def _forget_peak() -> bool:
    """Tell the kernel to count the peak from now on; False where it cannot be told."""
    try:
        REFERENCES.write_text("5")
    except OSError:
        return False
    return STATUS.exists()


def _kernel_peak() -> int:
    """VmHWM, in bytes; the file gives kibibytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _gpu_bytes(start: bool = False) -> int:
    """What torch's allocators hold at the start, or held at most since then."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    total = 0
    for device in range(torch.cuda.device_count()):
        if start:
            torch.cuda.reset_peak_memory_stats(device)
        total += torch.cuda.memory_allocated(device) if start else torch.cuda.max_memory_allocated(device)
    return total
