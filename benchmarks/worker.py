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

MARK = "posleak-bench-worker:"
"""Marks the line with the answer: libraries may print to standard output, too."""

GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Makes glibc return freed blocks over 1 MiB at once; its reserve varies by 100 MB between runs. Others ignore it."""

WARM = 64
"""Tokens of a warm-up pass, for allocations that happen only once."""


def peak_in_own_process(**asked: Any) -> dict[str, Any]:
    """Return {"peak_mb"} above the loaded model, or {"error"} with the reason why it could not run."""
    command, env = [sys.executable, "-m", __name__], {**os.environ, **GIVE_BACK}
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False, env=env)
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if answers:
        found: dict[str, Any] = json.loads(answers[-1].removeprefix(MARK))
        return found
    if done.returncode in (-9, 137):
        return {"error": "the machine ran out of memory"}
    raise CheckError(
        "a case of the benchmark failed", where=asked["case"], got=(done.stderr.strip() or "no message")[-600:]
    )


def main() -> None:
    import resource

    # With a limit, allocations fail with an error instead of the system killing a process.
    asked = json.load(sys.stdin)
    free = available_bytes()
    limit = min(free, asked.get("limit") or free)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    print(MARK + json.dumps(answer(asked, limit)))


def answer(asked: dict[str, Any], limit: int) -> dict[str, Any]:
    try:
        return {"peak_mb": _peak(asked) / 1e6}
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "memory" not in str(error).lower():
            raise
        return {"error": f"needs more memory than the available {format_bytes(limit)}"}


def _peak(asked: dict[str, Any]) -> int:
    from posleak.models import load, read_weights
    from posleak.peak import PeakMemory
    from posleak.probe import default_plan

    from .cases import case

    subject, length = load(asked["model"], **asked["loading"]), asked["length"]
    ids = np.asarray(asked["ids"], dtype=np.int64)
    chosen = case(asked["case"])
    first = ids[:, : min(WARM, length)]
    chosen.make(subject, default_plan(first.shape[1]), first)(first)
    run = chosen.make(subject, default_plan(length), ids)
    read_weights(subject.model)
    with PeakMemory() as peak:
        run(ids)
    return peak.bytes


if __name__ == "__main__":
    main()
