"""Faults from outside: killed processes, and two processes or threads that write one folder.

`make faults` runs the same for longer (docs/reliability.md has the counts).
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import posleak as pl
from posleak.errors import BusyError
from posleak.models import Subject
from support.errors import raises
from support.families import subject
from support.kills import REFUSED, SIZE, contents, differences, kill_often, two_at_once
from support.runs_tiny import assert_same_bits


@pytest.mark.parametrize(("work", "rounds"), [("measure", 3), ("trace", 3), ("claims", 2), ("circuit", 3)])
def test_killed_work_goes_on_to_the_same_bits_and_leaves_nothing(tmp_path: Path, work: str, rounds: int) -> None:
    series = kill_often(work, rounds, tmp_path)
    assert series.wrong == []
    assert series.rounds == rounds
    assert series.killed >= rounds - 1, "otherwise nothing was tested"


@pytest.mark.parametrize(("work", "rounds"), [("measure", 20), ("trace", 2)])
def test_two_processes_at_one_folder(tmp_path: Path, work: str, rounds: int) -> None:
    """One writes; the other is refused, or finds the work finished."""
    statuses, wrong = two_at_once(work, rounds, tmp_path)
    assert wrong == []
    assert all(sorted(pair) in ([0, 0], [0, REFUSED]) for pair in statuses), statuses
    assert any(REFUSED in pair for pair in statuses), "otherwise they were never at work together"


def test_two_threads_at_one_folder_and_one_model(tmp_path: Path) -> None:
    llama, refused, rounds = subject(), list[str](), 20
    whole = pl.measure(llama, out=tmp_path / "whole", **SIZE)
    before = llama.model.config._attn_implementation
    for number in range(rounds):
        folder = tmp_path / f"round-{number}"
        failed = _together(lambda folder=folder: pl.measure(llama, out=folder, **SIZE))
        assert all(isinstance(error, BusyError) for error in failed)
        refused += map(str, failed)
        assert len(failed) < 2
        assert list(differences(contents(tmp_path / "whole"), contents(folder))) == []
    assert refused, "otherwise they were never at work together"
    assert llama.model.config._attn_implementation == before
    assert_same_bits(pl.measure(llama, **SIZE), whole)


def _together(work: Any) -> list[Exception]:
    """Run a function in two threads that start at the same time; return the exceptions."""
    barrier, failed = threading.Barrier(2), list[Exception]()

    def run() -> None:
        barrier.wait()
        try:
            work()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


def test_a_lock_of_a_process_that_died_is_taken_over(tmp_path: Path) -> None:
    llama: Subject = subject()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("process 1 on nowhere")
    pl.measure(llama, out=tmp_path / "run", **SIZE)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["heads.parquet", "results.nc", "run.json"]


def test_a_folder_that_is_being_written_says_by_whom(tmp_path: Path) -> None:
    llama, errors = subject(), list[BusyError]()

    def other(done: int, of: int) -> None:
        def measure() -> None:
            with raises(BusyError, where=tmp_path / "run", got=f"process {os.getpid()} on ", remedy="--out") as error:
                pl.measure(llama, out=tmp_path / "run", **SIZE)
            errors.append(error.value)

        thread = threading.Thread(target=measure)
        thread.start()
        thread.join()

    pl.measure(llama, out=tmp_path / "run", progress=other, **SIZE)
    assert errors
