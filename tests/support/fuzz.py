"""Read many damaged and hostile files: `PYTHONPATH=tests python -m support.fuzz --cases 1000 --seed 0`.

Every case is one file with a few random changes, read by the function that a command would call. The function
may return or raise a PosleakError. Findings are other exceptions, more than ten seconds of CPU time, and more than 3 GB
above the memory at the start, which the system refuses to allocate. `make fuzz` runs more cases.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

import posleak as pl
from posleak.analyses.circuit.circuit import CIRCUIT_FILE, Circuit
from posleak.analyses.claims.examination import read_findings
from posleak.analyses.doctor.doctor import Diagnosis
from posleak.analyses.origin.origin import read_origin
from posleak.analyses.trace.trace import Trace
from posleak.errors import PosleakError
from posleak.files import read_json
from posleak.models import Subject
from posleak.reports.page import write_report
from posleak.runs.run import Run
from posleak.typed import plain
from support.families import tiny
from support.mutate import mutated_bytes, mutated_json
from support.runs_tiny import sealed

SECONDS, MEMORY = 10, 3 * 10**9
"""Limits of one case: CPU time, which does not depend on other work on the machine, and address space."""

CONDITION = "conditions/context-branches/run.json"

Case = tuple[str, Callable[[], object]]
"""The kind of file, and a function that reads it."""


class HungError(BaseException):
    """Raised when a case takes too long. It is not an Exception, so that no code catches it."""


@dataclass
class Outcome:
    """Counts of files read and rejected by kind, the slowest case, and the findings."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    slowest: tuple[float, str] = (0.0, "")
    findings: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        names = sorted({name for name, _ in self.counts})
        lines = [f"{name}: {self.counts[name, 'read']} read, {self.counts[name, 'refused']} refused" for name in names]
        total = sum(self.counts.values())
        return "\n".join(
            [
                *lines,
                f"{total} cases, longest {self.slowest[0]:.1f} s ({self.slowest[1]}), {len(self.findings)} findings",
            ]
        )


def fuzz(cases: Iterator[Case], number: int) -> Outcome:
    """Run `number` cases."""
    found = Outcome()
    signal.signal(signal.SIGPROF, _hung)
    for name, read in (next(cases) for _ in range(number)):
        start, result = time.process_time(), "read"
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read()
        except PosleakError:
            result = "refused"
        except (Exception, HungError):
            result = "finding"
            found.findings.append(f"{name}\n{traceback.format_exc(limit=-6)}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        seconds = time.process_time() - start
        found.slowest = max(found.slowest, (seconds, name))
        if seconds > SECONDS:
            found.findings.append(f"{name}: {seconds:.0f} s")
        found.counts[name, result] += 1
    return found


def _hung(*_: Any) -> NoReturn:
    raise HungError(f"more than {SECONDS} s")


def record_cases(rng: random.Random, place: Path) -> Iterator[Case]:
    """Damage one of the JSON files in a folder that `claims` wrote, with a circuit."""
    llama, good, bad = Subject.of(tiny("llama"), name="tiny-llama"), place / "good", place / "bad"
    for paper in ("position", "posleak"):
        pl.claims(llama, paper=paper, out=good, length=48, prompts=4)
    (good / "doctor.json").write_text(json.dumps(plain(pl.doctor(llama, short=True, length=48, prompts=4))))
    shutil.copytree(good, bad)
    names = ("run.json", "claims.json", "origin.json", CIRCUIT_FILE, "doctor.json", CONDITION)
    for number in _count():
        name = rng.choice(names)
        content = (good / name).read_bytes()
        how = rng.choice(("bytes", "json", "sealed", "sealed"))
        changed = (
            mutated_bytes(rng, content) if how == "bytes"
            else mutated_json(rng, content, sealed if how == "sealed" and name != "doctor.json" else None)
        )  # fmt: skip
        whole = number % 100 == 0
        yield name, lambda: _read_record(bad, good, name, changed, content, whole)  # noqa: B023


def _count() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


def _readers(name: str, folder: Path) -> list[Callable[[], object]]:
    """Return the functions that read this file of a folder."""
    readers: dict[str, list[Callable[[], object]]] = {
        "run.json": [lambda: Run.load_partial(folder), lambda: Run.load(folder)],
        "claims.json": [lambda: read_findings(folder, Run.load(folder).record.digest)],
        "origin.json": [lambda: read_origin(folder)],
        CIRCUIT_FILE: [lambda: Circuit.load(folder)],
        "doctor.json": [lambda: read_json(Diagnosis, folder / name, "")],
        CONDITION: [lambda: Trace.load(folder)],
    }
    return readers[name]


def _read_record(bad: Path, good: Path, name: str, changed: bytes, content: bytes, whole: bool) -> None:
    """Readers may raise; a report of the damaged folder and a good one must always be written (`whole`)."""
    (bad / name).write_bytes(changed)
    try:
        if whole:
            write_report([good, bad], bad.parent / "page.html")
        for read in _readers(name, bad):
            read()
    finally:
        (bad / name).write_bytes(content)


def sources(rng: random.Random, place: Path, only: str | None = None) -> list[Iterator[Case]]:
    """Return cases of records, of model files, or of both."""
    from support.fuzz_models import cases as model_cases

    made = {"records": record_cases, "models": model_cases}
    for name in made:
        (place / name).mkdir()
    return [cases(rng, place / name) for name, cases in made.items() if only in (None, name)]


def limit_memory() -> None:
    """Limit the address space to this much more than the process has now."""
    limit = psutil.Process().memory_info().vms + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("records", "models"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="posleak-fuzz-") as folder:
        rng = random.Random(asked.seed)
        kinds = sources(rng, Path(folder), asked.only)
        for kind in kinds:
            next(kind)  # everything is imported and made before memory is limited
        limit_memory()
        outcome = fuzz((next(rng.choice(kinds)) for _ in range(asked.cases)), asked.cases)
    print(outcome, *outcome.findings, sep="\n")
    sys.exit(bool(outcome.findings))
