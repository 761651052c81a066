"""Kill work at many moments and resume it: `PYTHONPATH=tests python -m support.kills claims=40 trace=20`.

Each round has its own folder. A child process writes to it and is killed with SIGKILL; the moments are spread over the
duration of the work. A second child resumes. The folder must then equal that of an uninterrupted run, bit by bit.
Children are forked from one process that has loaded torch and the model, so that a round costs little more than its
work.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

import posleak as pl
from posleak.errors import BusyError
from posleak.models import Subject
from support.circuit_tiny import LENGTH as CIRCUIT_LENGTH, counting
from support.families import tiny
from support.runs_tiny import files

Work = Callable[[Subject, Path], object]
SIZE: dict[str, Any] = {"length": 48, "prompts": 4}
REFUSED = 3
"""Exit status of a child that failed because another one writes to its folder."""

WORK: dict[str, Work] = {
    "measure": lambda subject, folder: pl.measure(subject, out=folder, batch=1, **SIZE),
    "trace": lambda subject, folder: pl.trace(subject, out=folder, by_layer=True, **SIZE),
    "claims": lambda subject, folder: pl.claims(subject, out=folder, **SIZE),
    "circuit": lambda _, folder: pl.circuit(counting(), out=folder, length=CIRCUIT_LENGTH, prompts=16),
}
TIMES = ("created", "finished", "sha256")
"""Fields that may differ between two records of the same run: times, and the checksum that covers them."""


@dataclass
class Outcome:
    """Of all rounds: how many were killed before their end, after which share of the work, and the findings."""

    rounds: int = 0
    killed: int = 0
    shares: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def kill_often(work: str, rounds: int, place: Path) -> Outcome:
    """Kill work of one kind after shares 1/(rounds+1), 2/(rounds+1), … of its CPU time.

    A process that ends before it is killed is started again in another folder and killed after half the share.
    """
    subject = Subject.of(tiny("llama"), name="tiny-llama")
    undisturbed = _child(work, subject, place / "whole")
    undisturbed.run_for(float("inf"))
    seconds = undisturbed.cpu_seconds()
    assert undisturbed.wait() == 0, f"{work} does not work undisturbed"
    expected, outcome = contents(place / "whole"), Outcome()
    for number in range(1, rounds + 1):
        share, folder, killed = number / (rounds + 1), place / f"round-{number}", False
        while not killed and share > 0.01:
            victim = _child(work, subject, folder)
            victim.run_for(share * seconds)
            if not (killed := victim.kill()):
                share, folder = share / 2, folder.with_name(f"{folder.name}-again")
        if killed:
            outcome.killed += 1
            outcome.shares.append(share)
        status = _child(work, subject, folder).wait()
        outcome.rounds += 1
        wrong = [f"exit status {status}"] if status else differences(expected, contents(folder))
        outcome.wrong += [f"{work}, killed after {share:.0%}: {each}" for each in wrong]
    return outcome


def two_at_once(work: str, rounds: int, place: Path) -> tuple[list[tuple[int, int]], list[str]]:
    """Start the same work in the same folder in two processes, `rounds` times; return exit statuses and findings."""
    subject = Subject.of(tiny("llama"), name="tiny-llama")
    assert _child(work, subject, place / "whole").wait() == 0
    expected, statuses, wrong = contents(place / "whole"), list[tuple[int, int]](), list[str]()
    for number in range(rounds):
        folder = place / f"round-{number}"
        both = [_child(work, subject, folder) for _ in range(2)]
        statuses.append((both[0].wait(), both[1].wait()))
        wrong += [f"round {number}: {each}" for each in differences(expected, contents(folder))]
    return statuses, wrong


@dataclass
class _Forked:
    pid: int

    def cpu_seconds(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)

    def run_for(self, seconds: float) -> None:
        """Wait until the process has used this CPU time, or has ended."""
        process = psutil.Process(self.pid)
        while process.status() != psutil.STATUS_ZOMBIE and self.cpu_seconds() < seconds:
            time.sleep(0.001)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> bool:
        """Kill the child and return whether it was still running."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait() == -signal.SIGKILL


def _child(work: str, subject: Subject, folder: Path) -> _Forked:
    pid = os.fork()
    if pid:
        return _Forked(pid)
    status = 1
    try:
        WORK[work](subject, folder)
        status = 0
    except BusyError:
        status = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def contents(folder: Path) -> dict[str, Any]:
    """Return all files of a folder by name: records without their times, other files as bytes."""
    return {name: _content(folder / name) for name in files(folder)}


def _content(path: Path) -> Any:
    if path.name != "run.json":
        return path.read_bytes()
    return {key: value for key, value in json.loads(path.read_text()).items() if key not in TIMES}


def differences(expected: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """Describe files that are missing, unexpected or different."""
    yield from (f"{name} is missing" for name in sorted(expected.keys() - found.keys()))
    yield from (f"{name} is left over" for name in sorted(found.keys() - expected.keys()))
    for name in sorted(expected.keys() & found.keys()):
        if expected[name] != found[name]:
            yield f"{name} differs"


if __name__ == "__main__":
    torch.set_num_threads(1)
    failed = False
    for argument in sys.argv[1:]:
        name, number = argument.split("=")
        with tempfile.TemporaryDirectory(prefix="posleak-kills-") as temporary:
            outcome = kill_often(name, int(number), Path(temporary))
        failed |= bool(outcome.wrong)
        print(
            f"{name}: {outcome.rounds} rounds, {outcome.killed} killed at work, {len(outcome.wrong)} wrong", flush=True
        )
        print(*outcome.wrong, sep="\n", end="\n" if outcome.wrong else "", flush=True)
    sys.exit(failed)
