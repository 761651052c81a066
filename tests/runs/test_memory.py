"""One guard for all work on a model: what is planned is not exceeded, and what does not fit is refused beforehand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posleak as pl
from benchmarks import bench
from posleak.analyses.claims.catalogue import registry
from posleak.analyses.claims.examination import examine
from posleak.analyses.claims.lab import Lab
from posleak.analyses.claims.papers.position import ring
from posleak.analyses.doctor.doctor import doctor, doctor_plan
from posleak.analyses.origin.context import origin_plan
from posleak.analyses.origin.origin import origin
from posleak.errors import InputError
from posleak.models import Subject
from posleak.models.memory import LIBRARY_BYTES
from posleak.probe import default_plan
from posleak.runs.memory import MemoryPlan, memory_plan, require_room, weight_bytes
from posleak.runs.run import Run
from posleak.runs.spec import MeasureSpec
from posleak.sweeps.sweep import sweep
from support.errors import assert_fields, raises
from support.families import subject
from support.runs_tiny import counted_passes

WIDE = {"hidden_size": 120, "num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 8}


def in_own_process(*work: str, model: str = "llama", limit: int | None = None, **asked: Any) -> list[dict[str, Any]]:
    """Of each work planned and peak bytes, or why it was refused."""
    given = {"work": work, "model": model, "more": asked.pop("more", {}), "asked": asked, "limit": limit}
    done = subprocess.run(
        [sys.executable, "-m", "support.memory_peak", json.dumps(given)], capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


# The plan is not exceeded


@pytest.mark.parametrize(
    ("work", "asked"),
    [
        ("measure", {"length": 32, "prompts": 512}),  # many short prompts: their products with each other
        ("measure", {"length": 256, "prompts": 48, "more": WIDE}),  # many heads: components at every pair
        ("measure", {"length": 4096, "prompts": 1, "origin": 64}),  # a long prompt: rows and moved keys
        ("measure", {"length": 3072, "prompts": 2, "metrics": "all"}),  # rows that meters look at
        ("measure", {"length": 128, "prompts": 64, "metrics": "all", "more": WIDE}),  # graphs and spectra of many heads
        ("origin", {"length": 256, "prompts": 4, "tokens": 4000, "more": {**WIDE, "vocab_size": 5000}}),
        ("doctor", {"length": 1500, "prompts": 3}),  # tokens × tokens
    ],
    ids=str,
)
def test_the_peak_stays_below_the_plan(work: str, asked: dict[str, Any]) -> None:
    (found,) = in_own_process(work, **asked)
    assert found["peak"] <= found["planned"], found


@pytest.mark.real
def test_the_peak_of_many_short_prompts_stays_below_the_plan_in_a_real_model() -> None:
    (found,) = in_own_process("measure", model="smollm2-135m", length=64, prompts=64)
    assert found["peak"] <= found["planned"], found


def test_plans_grow_with_what_is_asked_for(llama: Subject) -> None:
    short, long = default_plan(64), default_plan(4096)
    assert origin_plan(llama, short, 8, 100, 8).total < origin_plan(llama, long, 8, 100, 8).total
    assert origin_plan(llama, short, 8, 100, 8).total < origin_plan(llama, short, 8, 10_000, 8).total
    assert origin_plan(llama, short, 8, 100, 8).total < origin_plan(llama, short, 800, 100, 8).total
    assert doctor_plan(llama, short, 8, 8).total < doctor_plan(llama, short, 800, 8).total
    two = [doctor_plan(llama, default_plan(n), 2, 2).activations for n in (2048, 4096)]
    assert 3.5 < two[1] / two[0] < 4, "eager attention holds all pairs of tokens"
    big = subject(vocab_size=20_000)
    copied, plain = (doctor_plan(big, short, 2, 2, short=form).activations for form in (False, True))
    assert copied > max(plain, 2 * 2 * 20_000 * 30), "embeddings and head, rounded"


# What does not fit is refused before any forward pass


def refused(work: Callable[..., Any], llama: Subject, **asked: Any) -> InputError:
    """Return the error that the call raises, which is quick and happens before any forward pass."""
    start = time.process_time()
    with counted_passes(llama.model) as passes, pytest.raises(InputError) as error:
        work(llama, **asked)
    assert passes == []
    assert time.process_time() - start < 2
    assert "0.0 " not in str(error.value)
    return error.value


@pytest.fixture
def ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 8 GB free."""
    monkeypatch.setattr("posleak.runs.memory.available_bytes", lambda device: 8 * 10**9)


@pytest.mark.usefixtures("ordinary")
@pytest.mark.parametrize(
    ("work", "what"),
    [(pl.measure, "the measurement"), (origin, "the analysis of position 0"), (doctor, "the diagnosis")],
    ids=["measure", "origin", "doctor"],
)
def test_a_million_tokens_are_refused_at_once(llama: Subject, work: Callable[..., Any], what: str) -> None:
    error = refused(work, llama, length=1_000_000)
    assert_fields(
        error, where="tiny-llama", what=(what, "machine"), got="1000000 tokens", expected="8.0 GB", remedy="--length"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="address-space limits are Linux's")
def test_a_limit_of_the_process_is_a_refusal_and_no_crash() -> None:
    """As `ulimit -v` sets it."""
    for found in in_own_process("measure", "origin", "doctor", limit=300 * 10**6, length=32768, prompts=4):
        assert all(part in found["refused"] for part in ("the machine", "32768 tokens", "MB", "length="))


@pytest.mark.skipif(sys.platform != "linux", reason="address-space limits are Linux's")
def test_what_fits_into_a_limit_of_the_process_is_done() -> None:
    for found in in_own_process("measure", "origin", "doctor", limit=600 * 10**6, length=64, prompts=4):
        assert found["planned"] < 600 * 10**6


def allowing(llama: Subject, room: int) -> int:
    """A limit that leaves `room` bytes above the loaded model."""
    return weight_bytes(llama) + LIBRARY_BYTES + room


def test_origin_reads_fewer_prompts_at_once_to_stay_within_a_limit(llama: Subject) -> None:
    asked: dict[str, Any] = {"length": 64, "prompts": 8, "tokens": 20}
    room = origin_plan(llama, default_plan(64), 8, 20, 2).total
    with counted_passes(llama.model) as whole:
        expected = origin(llama, **asked)
    with counted_passes(llama.model) as parts:
        found = origin(llama, max_memory=allowing(llama, room), **asked)
    assert 8 in whole
    assert 8 not in parts
    assert parts.count(2) >= 8, "four batches in two versions"
    assert np.allclose(found.reading.at_0, expected.reading.at_0, atol=1e-5)
    assert np.allclose(found.trajectory.norm, expected.trajectory.norm, rtol=1e-5)
    error = refused(origin, llama, batch=8, max_memory=allowing(llama, room), **asked)
    assert_fields(error, what="--max-memory", remedy=("--batch", "--max-memory", "500 MB"))


def test_doctor_reads_fewer_prompts_at_once_to_stay_within_a_limit(llama: Subject) -> None:
    room = doctor_plan(llama, default_plan(96), 12, 3).total
    with counted_passes(llama.model) as whole:
        expected = doctor(llama)
    with counted_passes(llama.model) as parts:
        found = doctor(llama, max_memory=allowing(llama, room))
    assert max(whole) > 12  # tokens alone, at many places
    assert 12 in whole
    assert 12 not in parts
    assert parts.count(3) >= 4
    assert [(check.id, check.ok) for check in found.checks] == [(check.id, check.ok) for check in expected.checks]
    assert found.ok
    error = refused(doctor, llama, max_memory=allowing(llama, 10**6))
    assert_fields(error, what=("diagnosis", "--max-memory"), expected="1.0 MB", remedy="--max-memory")


def test_a_sweep_stays_within_its_limit(llama: Subject, tmp_path: Path) -> None:
    room = memory_plan(llama, MeasureSpec(length=64, prompts=8, batch=2)).total
    small: Any = {"models": llama, "length": 64, "prompts": 8, "max_memory": allowing(llama, room)}
    (row,) = sweep({"models": "x"}, **small, out=tmp_path / "fits").balance.rows
    assert Run.load(row.run).record.spec.batch == 2
    (status,) = sweep({"models": "x"}, **{**small, "max_memory": "1MB"}, out=tmp_path / "large").cells
    assert "--max-memory" in status.why


def test_the_benchmark_runs_what_fits() -> None:
    """Eager attention, and the copy of the model that it needs, do not fit beside the others."""
    llama = subject(scale=3)
    asked: dict[str, Any] = {"lengths": (1024,), "names": ("posleak", "eager"), "repeats": 1}
    room = memory_plan(llama, MeasureSpec(length=1024, prompts=1, batch=1)).total
    by_name = {result.name: result for result in bench(llama, max_memory=allowing(llama, room), **asked).results}
    assert by_name["posleak"].seconds is not None
    assert by_name["eager"].seconds is None
    assert all(part in str(by_name["eager"].error) for part in ("eager", "memory", "--max-memory"))
    assert all(each.error is None for each in bench(llama, max_memory=allowing(llama, 10**9), **asked).results)
    error = refused(bench, llama, lengths=(1024,), max_memory=allowing(llama, 10**5))
    assert_fields(error, what=("forward", "--max-memory"), got="1024 tokens", expected="100 kB", remedy="--length")


def test_a_claim_whose_copy_does_not_fit_is_not_applicable(llama: Subject) -> None:
    claim, spec = [each for each in registry() if each.test is ring], MeasureSpec(length=64, prompts=4)
    assert next(examine(Lab(llama, spec), claim)).details["dtype"] == "float64"
    with counted_passes(llama.model) as passes:
        found = next(examine(Lab(llama, spec, max_memory=allowing(llama, 10**6)), claim))
    assert passes == []
    assert found.verdict.value == "not applicable"
    assert all(part in str(found.reason) for part in ("float64", "memory", "max_memory="))


def test_the_guard_tells_need_and_room_apart(llama: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posleak.runs.memory.available_bytes", lambda device: 1_040_000_000)
    with raises(
        InputError,
        where="tiny-llama",
        what="it needs",
        got="1,040,000,001 bytes for this",
        expected="1,040,000,000 bytes",
        remedy="less",
    ):
        require_room(llama, MemoryPlan(1_040_000_001, 0, 0), None, what="it", of="this", remedy="less")
    require_room(llama, MemoryPlan(1_040_000_000, 0, 0), None, what="it", of="this", remedy="less")


# Numbers that cannot be meant


def absurd() -> Iterator[Any]:
    for length in (2**24 + 1, 10**12):
        yield pytest.param(pl.measure, {"length": length}, ("length", "large"), "16,777,216")
        yield pytest.param(origin, {"length": length}, ("length", "large"), "16,777,216")
        yield pytest.param(doctor, {"length": length}, ("length", "large"), "16,777,216")
        yield pytest.param(bench, {"lengths": (64, length)}, ("length", "large"), "16,777,216")
    for work in (pl.measure, origin, doctor):
        yield pytest.param(work, {"prompts": 10**6 + 1}, ("prompts", "large"), "1,000,000")
    yield pytest.param(origin, {"tokens": 10**12}, ("tokens", "large"), "1,000,000")
    yield pytest.param(origin, {"tokens": 1}, ("tokens", "small"), "at least 2")
    yield pytest.param(origin, {"prompts": 2}, ("prompts", "small"), "at least 3")
    yield pytest.param(origin, {"batch": -1}, ("batch", "small"), "at least 0")
    yield pytest.param(doctor, {"prompts": 1}, ("prompts", "small"), "at least 2")
    yield pytest.param(bench, {"batch": 10**9}, ("prompts", "large"), "1,000,000")
    yield pytest.param(pl.measure, {"density": 65}, ("density", "large"), "at most 64")
    yield pytest.param(pl.measure, {"density": 10**12}, ("density", "large"), "at most 64")
    yield pytest.param(pl.measure, {"batch": 10**12}, ("batch", "large"), "1,000,000")
    yield pytest.param(pl.measure, {"seed": 2**32}, ("seed", "large"), "4,294,967,295")


@pytest.mark.parametrize(("work", "asked", "what", "bound"), list(absurd()))
def test_absurd_numbers_are_refused_at_once_with_their_bound(
    llama: Subject, work: Callable[..., Any], asked: dict[str, Any], what: tuple[str, str], bound: str
) -> None:
    assert_fields(refused(work, llama, **asked), what=what, expected=bound)


@pytest.mark.parametrize("asked", [{"length": 10**18}, {"length": 512, "density": 10**18}])
def test_no_plan_is_made_of_absurd_numbers(asked: dict[str, int]) -> None:
    start = time.process_time()
    with raises(InputError, got=10**18, expected=("16,777,216" if "density" not in asked else 64)):
        default_plan(**asked)
    assert time.process_time() - start < 0.1


def test_the_largest_numbers_are_planned_in_no_time(llama: Subject) -> None:
    start = time.process_time()
    spec = MeasureSpec(length=2**24, prompts=10**6, density=64)
    assert memory_plan(llama, spec.resolved()).total > 10**15
    assert time.process_time() - start < 2
