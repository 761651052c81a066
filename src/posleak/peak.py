"""Peak memory of a piece of work, above the memory that was in use before it.

    with PeakMemory() as peak:
        ...
    peak.bytes

On Linux the kernel records the largest resident size and can reset it; elsewhere it is sampled. On a GPU it is the peak
of torch's allocator (not tested on a GPU).

Weights are mapped from their file and become resident when they are first read. Call `posleak.models.read_weights`
first, or they count towards the peak.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import psutil

STATUS_FILE, RESET_FILE = Path("/proc/self/status"), Path("/proc/self/clear_refs")
SAMPLING_SECONDS = 0.005


class PeakMemory:
    """A context manager; afterwards `bytes` is peak minus start, of main memory and GPUs together."""

    def __init__(self) -> None:
        self.bytes, self._largest, self._over = 0, 0, threading.Event()
        self._sampler: threading.Thread | None = None

    def __enter__(self) -> PeakMemory:
        self._before = psutil.Process().memory_info().rss
        if not _reset_peak():
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        self._gpus = _gpu_bytes(start=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampler is not None:
            self._over.set()
            self._sampler.join()
        peak = _kernel_peak() if self._sampler is None else self._largest
        self.bytes = max(0, peak - self._before) + max(0, _gpu_bytes() - self._gpus)

    def _sample(self) -> None:
        """Keep the largest resident size, sampled until the work is over and once more."""
        process, over = psutil.Process(), False
        while not over:
            over = self._over.wait(SAMPLING_SECONDS)
            self._largest = max(self._largest, process.memory_info().rss)


def _reset_peak() -> bool:
    """Reset the kernel's peak; return False where this is not supported."""
    try:
        RESET_FILE.write_text("5")
    except OSError:
        return False
    return STATUS_FILE.exists()


def _kernel_peak() -> int:
    """Return VmHWM in bytes; the file has kibibytes."""
    line = next(line for line in STATUS_FILE.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _gpu_bytes(start: bool = False) -> int:
    """Return what torch's allocators hold at the start, or their peak since then."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    total = 0
    for device in range(torch.cuda.device_count()):
        if start:
            torch.cuda.reset_peak_memory_stats(device)
        total += torch.cuda.memory_allocated(device) if start else torch.cuda.max_memory_allocated(device)
    return total
