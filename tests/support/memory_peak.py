"""A program that tests run in a separate process: planned and peak memory of some work on a tiny or a real model.

    python -m support.memory_peak '{"work": ["measure"], "model": "llama", "more": {}, "asked": {}, "limit": null}'

`limit` is an address-space limit in bytes above what the process holds when its model is loaded. Prints JSON, for each
work: `planned` and `peak` bytes, or `refused`: the message of posleak's error.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

import posleak as pl
from posleak.analyses.doctor.doctor import doctor
from posleak.analyses.origin.origin import origin
from posleak.errors import PosleakError, PosleakWarning
from posleak.models import Subject, read_weights
from posleak.peak import PeakMemory
from posleak.runs import memory
from posleak.runs.memory import MemoryPlan
from support.families import tiny

WORK: dict[str, Callable[..., Any]] = {"measure": pl.measure, "origin": origin, "doctor": doctor}
PLANS: list[MemoryPlan] = []
"""The plans that were checked against the free memory."""


def watched(guard: Callable[..., None]) -> Callable[..., None]:
    def require_room(subject: Subject, plan: MemoryPlan, *more: Any, **named: Any) -> None:
        PLANS.append(plan)
        guard(subject, plan, *more, **named)

    return require_room


def limit_address_space(above: int) -> None:
    import resource

    import psutil

    most = int(psutil.Process().memory_info().vms) + above
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main(
    work: list[str], model: str, more: dict[str, Any], asked: dict[str, Any], limit: int | None
) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PosleakWarning)
    subject = Subject.of(tiny(model, **more), name=model) if "-" not in model else pl.load(model)
    memory.require_room = watched(memory.require_room)
    read_weights(subject.model)
    if limit is not None:
        limit_address_space(limit)
    return [measured(WORK[each], subject, asked) for each in work]


def measured(work: Callable[..., Any], subject: Subject, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        with PeakMemory() as peak:
            work(subject, **asked)
    except PosleakError as error:
        return {"refused": str(error)}
    return {"planned": PLANS[-1].total, "peak": peak.bytes}


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))
