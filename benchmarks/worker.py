"""Peak memory of one contestant, in a process of its own, which is told on standard input what to run."""

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
"""Marks the line with the answer, since libraries may print to standard output too."""

GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Makes glibc give back every freed block over 1 MiB at once: what it would keep for later varies by 100 MB from run to
run, whatever the contestant does. Other C libraries ignore it."""

WARM = 64
"""Tokens of a first pass, which allocates what is allocated only once."""


def peak_in_own_process(**asked: Any) -> dict[str, Any]:
    """`peak_mb` above the loaded model, or `error`: why it could not be run."""
    command, env = [sys.executable, "-m", __name__], {**os.environ, **GIVE_BACK}
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False, env=env)
    answers = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if answers:
        found: dict[str, Any] = json.loads(answers[-1].removeprefix(MARK))
        return found
    if done.returncode in (-9, 137):
        return {"error": "the machine ran out of memory"}
    raise CheckError(
        "a contestant of the benchmark failed", where=asked["case"], got=(done.stderr.strip() or "no message")[-600:]
    )


def main() -> None:
    import resource

    # Past what the machine has, allocations fail with a message, instead of the system killing some process.
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
        return {"error": f"needs more memory than the {format_bytes(limit)} that there are"}


def _peak(asked: dict[str, Any]) -> int:
    from posleak.models import load, read_weights
    from posleak.peak import PeakMemory
    from posleak.probe import default_plan

    from .cases import case

    subject, length = load(asked["model"], **asked["loading"]), asked["length"]
    ids = np.asarray(asked["ids"], dtype=np.int64)
    contestant = case(asked["case"])
    first = ids[:, : min(WARM, length)]
    contestant.make(subject, default_plan(first.shape[1]), first)(first)
    run = contestant.make(subject, default_plan(length), ids)
    read_weights(subject.model)
    with PeakMemory() as peak:
        run(ids)
    return peak.bytes


if __name__ == "__main__":
    main()
