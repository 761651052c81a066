"""The benchmark: memory of each case in its own process, then agreement, then time in interleaved rounds."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from posleak.errors import CheckError, InputError, did_you_mean
from posleak.inputs import prepare
from posleak.models import Identity, Subject, available_bytes
from posleak.probe import default_plan
from posleak.runs.memory import MemoryPlan, describe_prompts, memory_plan, require_room
from posleak.runs.software import versions
from posleak.runs.spec import MeasureSpec, parse_bytes
from posleak.typed import plain

from .cases import CASES, FORWARD, ONCE, POSLEAK, Case, Ids, Runner
from .statistics import Statistics
from .timing import Spread, interleaved, ratios, spread
from .worker import peak_in_own_process

LENGTHS = (1024, 2048, 4096, 8192)
REPEATS, PEER_REPEATS = 5, 3
PEERS_UP_TO = 2048
"""Longest prompt for peers: time and memory of eager attention grow with the square of the length."""

MAX_DIFFERENCE = 1e-2
"""Largest allowed difference of a peer in nats. Rounding gives 5e-5 for SmolLM2 in float32; a wrong row gives nats."""

MAX_MEMORY_SHARE = 0.7
"""Cases that need more than this share of the free memory are not timed together with the others."""


@dataclass(frozen=True)
class BenchResult:
    """Result of one case at one length.

    ratio          of its time to that of the plain forward pass
    ratio_to_base  of its time to that of the case `base`, if this is not the forward pass
    error          why a value is missing
    """

    name: str
    length: int
    batch: int
    seconds: Spread | None = None
    ratio: Spread | None = None
    peak_mb: float | None = None
    planned_mb: float | None = None
    agreement: float | None = None
    error: str | None = None
    base: str = FORWARD
    ratio_to_base: Spread | None = None

    def as_dict(self) -> dict[str, Any]:
        time, ratio, to_base = self.seconds, self.ratio, self.ratio_to_base or self.ratio
        return {
            "name": self.name, "length": self.length, "batch": self.batch,
            "seconds": time and time.median, "seconds_range": time and [time.low, time.high],
            "ratio_to_forward": ratio and ratio.median, "ratio_range": ratio and [ratio.low, ratio.high],
            "base": self.base, "ratio_to_base": to_base and to_base.median,
            "ratio_to_base_range": to_base and [to_base.low, to_base.high],
            "n": time.n if time else 0, "peak_mb": self.peak_mb, "planned_mb": self.planned_mb,
            "agreement_nats": self.agreement, "error": self.error,
        }  # fmt: skip


@dataclass(frozen=True)
class Benchmark:
    """All results, with the model and the machine."""

    identity: Identity
    results: list[BenchResult]
    machine: dict[str, Any] = field(default_factory=lambda: machine())

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `python -m benchmarks --json` (docs/json.md)."""
        peers = {case.package: case.version for case in CASES if case.package is not None and case.version is not None}
        return {
            "model": self.identity.name, "identity": plain(self.identity), "machine": self.machine,
            "versions": {**versions(), **peers}, "cases": [result.as_dict() for result in self.results],
        }  # fmt: skip


def bench(
    subject: Subject,
    *,
    reload: dict[str, Any] | None = None,
    lengths: Sequence[int] = LENGTHS,
    names: Sequence[str] = (),
    repeats: int = REPEATS,
    peers_up_to: int = PEERS_UP_TO,
    batch: int = 1,
    seed: int = 0,
    max_memory: str | int | None = None,
    progress: Callable[[str], None] = lambda status: None,
) -> Benchmark:
    """Measure time and memory of the cases.

    reload      {"model", "loading"}: how another process loads the model, to measure peak memory; None: not measured
    max_memory  memory limit of a process, including the model: a case that needs more, or more than is free, is not run
    """
    chosen, limit = chosen_cases(names), parse_bytes(max_memory)
    for length in lengths:
        MeasureSpec(length=length, prompts=batch, batch=batch, seed=seed)  # rejects out-of-range values
    results = []
    for length in lengths:
        cases = [case for case in chosen if length <= peers_up_to or not _is_extra(case)]
        refused = refusals(subject, cases, batch, length, limit)
        ids = prepare(subject, "random", bos="auto", length=length, seed=seed).batch(range(batch))
        results += LengthBenchmark(subject, ids, cases, repeats, reload, progress, refused, limit).results()
    return Benchmark(subject.identity, results)


def refusals(subject: Subject, cases: Sequence[Case], batch: int, length: int, limit: int | None) -> dict[str, str]:
    """Return the cases that do not fit into memory together with those before them, and the reasons."""
    refused, persistent, running = dict[str, str](), 0, 0
    for case in cases:
        need = case.needs(subject, batch, length)
        try:
            require_room(
                subject, MemoryPlan(max(running, need.running), 0, persistent + need.persistent), limit, what=case.name,
                of=f"{describe_prompts(batch, length)}, together with the other cases", remedy="use a shorter --length",
            )  # fmt: skip
        except InputError as error:
            if case.name == FORWARD:
                raise
            refused[case.name] = f"{error.what}: {error.got}, {error.expected}"
        else:
            persistent, running = persistent + need.persistent, max(running, need.running)
    return refused


def _is_extra(case: Case) -> bool:
    """Return whether a case is left out for long prompts."""
    return case.name not in (FORWARD, POSLEAK, ONCE)


def chosen_cases(names: Sequence[str]) -> list[Case]:
    """Return the named cases, or all whose packages are installed; always with the plain forward pass."""
    all_names = [case.name for case in CASES]
    for name in names:
        if name not in all_names:
            raise InputError(
                "unknown case", got=name, expected=", ".join(all_names), remedy=did_you_mean(name, all_names)
            )
    bases = {FORWARD, *(case.base for case in CASES if case.name in names)}
    chosen = [case for case in CASES if case.name in bases or (case.name in names if names else not case.missing)]
    if any(case.is_peer for case in chosen) and POSLEAK not in [case.name for case in chosen]:
        return chosen_cases([*names, POSLEAK])  # peers are compared with posleak, so it must run too
    if missing := [case for case in chosen if case.missing]:
        raise InputError(
            "the package of a peer is not installed", got=", ".join(str(case.package) for case in missing),
            remedy="pip install 'posleak[bench]'",
        )  # fmt: skip
    return chosen


@dataclass
class LengthBenchmark:
    """Benchmark of all cases at one length, on ids [B, T].

    refused   reasons of the cases that do not fit into memory;  limit: memory limit of a process in bytes
    """

    subject: Subject
    ids: Ids
    cases: list[Case]
    repeats: int
    reload: dict[str, Any] | None
    progress: Callable[[str], None]
    refused: dict[str, str] = field(default_factory=dict)
    limit: int | None = None

    def results(self) -> list[BenchResult]:
        """Measure memory, check agreement, then measure time."""
        memory = {case.name: self._memory(case) for case in self.cases}
        if "error" in memory[FORWARD]:
            raise InputError(
                "the plain forward pass does not fit into memory", where=f"{self.ids.shape[1]} tokens",
                got=memory[FORWARD]["error"], remedy="use a shorter --length",
            )  # fmt: skip
        able = [case for case in self.cases if "error" not in memory[case.name]]
        runners = {case.name: case.make(self.subject, default_plan(self.ids.shape[1]), self.ids) for case in able}
        statistics = {}
        for name, run in runners.items():
            self._report(f"{name}: first pass, not timed")
            statistics[name] = run(self.ids)
        agreement = {case.name: self._agreement(case, statistics) for case in self.cases}
        times = self._times(runners)
        return [self._result(case, times, memory[case.name], agreement[case.name]) for case in self.cases]

    def _report(self, status: str) -> None:
        self.progress(f"{self.ids.shape[1]} tokens, {status}")

    def _memory(self, case: Case) -> dict[str, Any]:
        """Return the peak memory in a separate process, and an error if it is too large for timing."""
        if case.name in self.refused:
            return {"error": self.refused[case.name]}
        if self.reload is None or case.name == ONCE:
            return {}
        self._report(f"{case.name}: memory")
        memory = peak_in_own_process(
            case=case.name, length=self.ids.shape[1], ids=self.ids.tolist(), limit=self.limit, **self.reload
        )
        if memory.get("peak_mb", 0) * 1e6 > MAX_MEMORY_SHARE * available_bytes():
            memory["error"] = "not timed: fits into memory alone, but not together with the other cases"
        return memory

    def _agreement(self, case: Case, statistics: dict[str, Statistics | None]) -> float | None:
        """Return the largest difference of a peer from posleak in nats; raise CheckError if it exceeds rounding."""
        theirs, ours = statistics.get(case.name), statistics.get(POSLEAK)
        if not case.is_peer or theirs is None or ours is None:
            return None
        if not (difference := theirs.max_difference(ours)) <= MAX_DIFFERENCE:
            raise CheckError(
                "the results of a peer differ from those of posleak, so that times cannot be compared",
                where=f"{case.name}, {self.ids.shape[1]} tokens",
                got=f"{difference:.3g} nats",
                expected=f"at most {MAX_DIFFERENCE}",
            )
        return difference

    def _times(self, runners: dict[str, Runner]) -> dict[str, list[float | None]]:
        """Return the seconds of every case by round."""
        peers = {case.name for case in self.cases if case.is_peer}
        repeats = {name: min(self.repeats, PEER_REPEATS) if name in peers else self.repeats for name in runners}
        work = {name: (lambda run=run: run(self.ids)) for name, run in runners.items()}
        return interleaved(work, repeats, self._report)

    def _result(
        self, case: Case, times: dict[str, list[float | None]], memory: dict[str, Any], agreement: float | None
    ) -> BenchResult:
        batch, length, name = *self.ids.shape, case.name
        spec = MeasureSpec(length=length, prompts=batch, batch=batch)
        planned = memory_plan(self.subject, spec).total / 1e6 if name == POSLEAK else None
        has_base = case.base != FORWARD and name in times and case.base in times
        return BenchResult(
            name, length, batch,
            spread(times[name]) if name in times else None,
            ratios(times[name], times[FORWARD]) if name in times else None,
            memory.get("peak_mb"), planned, agreement, memory.get("error"), case.base,
            ratios(times[name], times[case.base]) if has_base else None,
        )  # fmt: skip


def machine() -> dict[str, Any]:
    """Return a description of the machine."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
