"""Damaged files are read in a separate process, with limited memory; a crash of it fails the test."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.fuzz import Outcome, fuzz

CASES = 100
"""Number of cases of each kind; `make nightly` runs thousands."""


@pytest.mark.parametrize(("kind", "seed"), [("records", 1), ("models", 2)])
def test_damaged_files_are_read_or_refused(kind: str, seed: int) -> None:
    command = [sys.executable, "-m", "support.fuzz", "--cases", str(CASES), "--seed", str(seed), "--only", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert f"{CASES} cases" in done.stdout
    assert ", 0 findings" in done.stdout


def test_the_test_above_can_fail() -> None:
    def broken() -> None:
        raise KeyError("a traceback")

    outcome: Outcome = fuzz(iter([("file", broken), ("file", lambda: None)]), 2)
    assert outcome.counts == {("file", "finding"): 1, ("file", "read"): 1}
    assert "KeyError" in outcome.findings[0]
