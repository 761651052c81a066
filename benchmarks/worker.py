"""Peak memory of one case, in a separate process that reads its task from standard input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np

from posleak.errors import CheckError
from posleak.models import available_bytes
from posleak.text import format_bytes

RESULT_MARK = "posleak-bench-worker:"
"""Start of the line with the result; libraries may also print to standard output."""

MALLOC_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Makes glibc return freed blocks over 1 MiB at once, because its reserve varies by 100 MB between runs."""

WARMUP_TOKENS = 64
"""Tokens of the warm-up pass, which makes the allocations that happen only once."""


def peak_in_own_process(**task: Any) -> dict[str, Any]:
    """Run a case in a new process. Return {"peak_mb"} above the loaded model, or {"error"} if memory was too small.

    task    case, model, loading (options of `load`), length, ids, and optionally limit in bytes
    """
    command, env = [sys.executable, "-m", __name__], {**os.environ, **MALLOC_SETTINGS}
    done = subprocess.run(command, input=json.dumps(task), capture_output=True, text=True, check=False, env=env)
    results = [line for line in done.stdout.splitlines() if line.startswith(RESULT_MARK)]
    if results:
        result: dict[str, Any] = json.loads(results[-1].removeprefix(RESULT_MARK))
        return result
    if done.returncode in (-9, 137):
        return {"error": "the machine ran out of memory"}
    raise CheckError(
        "a case of the benchmark failed", where=task["case"], got=(done.stderr.strip() or "no message")[-600:]
    )


def main() -> None:
    """Read a task from standard input, run it with limited memory, and print the result."""
    import resource

    # With a limit, allocations fail with an error instead of the system killing a process.
    task = json.load(sys.stdin)
    free = available_bytes()
    limit = min(free, task.get("limit") or free)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    print(RESULT_MARK + json.dumps(run_task(task, limit)))


def run_task(task: dict[str, Any], limit: int) -> dict[str, Any]:
    """Return the peak memory of a task, or an error if it exceeds `limit` bytes."""
    try:
        return {"peak_mb": _peak(task) / 1e6}
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error).lower():
            raise
        return {"error": f"needs more memory than the available {format_bytes(limit)}"}


def _peak(task: dict[str, Any]) -> int:
    """Return the peak memory of a case above the loaded model, in bytes."""
    from posleak.models import load, read_weights
    from posleak.peak import PeakMemory
    from posleak.probe import default_plan

    from .cases import case

    subject, length = load(task["model"], **task["loading"]), task["length"]
    ids = np.asarray(task["ids"], dtype=np.int64)
    chosen = case(task["case"])
    warmup = ids[:, : min(WARMUP_TOKENS, length)]
    chosen.make(subject, default_plan(warmup.shape[1]), warmup)(warmup)
    run = chosen.make(subject, default_plan(length), ids)
    read_weights(subject.model)
    with PeakMemory() as peak:
        run(ids)
    return peak.bytes


if __name__ == "__main__":
    main()
