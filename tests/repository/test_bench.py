"""The benchmark compares like with like: agreement before time, ratios within a round, memory in processes apart."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import CASES, bench, chosen_cases, worker
from benchmarks.cases import case
from benchmarks.statistics import Statistics, from_scores
from benchmarks.timing import Spread, interleaved, ratios, spread
from posleak.errors import CheckError, InputError
from posleak.models import Subject
from posleak.probe import Call, attach, default_plan
from support.errors import raises
from support.families import tiny
from support.inputs_subject import byte_tokenizer

ROOT = Path(__file__).parents[2]
N = 64
PLAN = default_plan(N)
MORE: dict[str, dict[str, Any]] = {
    "ministral3": {
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.2,
            "original_max_position_embeddings": 8,
        }
    }
}  # fmt: skip
"""Queries scaled by position, a fourth part of the total."""

IDS = np.random.default_rng(3).integers(3, 101, (2, N))


@pytest.fixture(scope="module")
def soft_llama() -> Subject:
    """Contestants multiply in another order, and very sharp logits would make much of it."""
    return Subject.of(tiny("llama", scale=3), byte_tokenizer(), name="tiny-llama")


def statistics_of(subject: Subject, name: str) -> Statistics:
    result = case(name).make(subject, PLAN, IDS)(IDS)
    assert result is not None
    return result


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "smollm3", "ministral3"])
def test_eager_attention_gives_the_same_statistics(family: str) -> None:
    llama = Subject.of(tiny(family, scale=3, **MORE.get(family, {})), name=family)
    ours, theirs = statistics_of(llama, "posleak"), statistics_of(llama, "eager")
    assert theirs.total.shape == ours.total.shape
    assert np.isfinite(theirs.total).sum() > 1000
    assert theirs.max_difference(ours) < 1e-4
    assert llama.model.config._attn_implementation == "sdpa"


def test_scores_give_the_total_and_drift(soft_llama: Subject) -> None:
    """Of rows as TransformerLens caches them: hidden keys at the dtype's lowest number, windows included."""
    windowed = Subject.of(tiny("gemma3_text", scale=3), name="gemma")
    scores: list[Tensor] = []

    class Look:
        def observe(self, call: Call, out: Tensor) -> None:
            rows = torch.tensor(PLAN.rows)
            lowest = torch.finfo(torch.float32).min
            scores.append(call.logits(rows).masked_fill(~call.visibility.rows(rows), lowest))

    for subject in (soft_llama, windowed):
        scores.clear()
        with attach(subject.model, [Look()]) as probe:
            probe.forward(torch.from_numpy(IDS))
        theirs, ours = from_scores(scores, PLAN), statistics_of(subject, "posleak")
        assert ours.parts.keys() == {"mask", "drift", "sink"}
        assert theirs.parts.keys() == {"drift"}
        assert theirs.max_difference(ours) < 1e-6


@pytest.mark.parametrize("name", ["TransformerLens", "nnsight"])
def test_the_peers_give_the_same_statistics(soft_llama: Subject, name: str) -> None:
    if case(name).missing:
        pytest.skip(f"{case(name).package} is not installed (pip install 'posleak[bench]')")
    assert statistics_of(soft_llama, name).max_difference(statistics_of(soft_llama, "posleak")) < 1e-4


def test_a_case_that_computes_something_else_stops_the_benchmark(
    soft_llama: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = replace(case("eager"), make=lambda subject, plan, ids: case("posleak sink=cut").make(subject, plan, ids))
    monkeypatch.setattr("benchmarks.runner.CASES", (case("forward"), case("posleak"), wrong))
    with raises(CheckError, where="eager, 64 tokens", got="nats", expected=0.01):
        bench(soft_llama, lengths=(N,), repeats=1)


def test_a_missing_pair_is_no_agreement() -> None:
    one = Statistics(np.array([1.0, np.nan]), np.array([0.5]), {})
    assert one.max_difference(one) == 0
    assert one.max_difference(Statistics(np.array([1.0, 2.0]), np.array([0.5]), {})) == np.inf
    assert one.max_difference(Statistics(np.array([1.0, np.nan]), np.array([0.5, 0.5]), {})) == np.inf
    assert one.max_difference(Statistics(np.array([1.0, np.nan]), np.array([0.75]), {})) == 0.25


def test_every_round_runs_every_case_once_and_turns_their_order() -> None:
    ran: list[str] = []
    work = {name: (lambda name=name: ran.append(name)) for name in "abc"}
    seconds = interleaved(work, {"a": 3, "b": 3, "c": 2}, lambda status: None)
    assert "".join(ran) == "abc" + "cba" + "ab"
    assert seconds["c"][2] is None
    assert spread(seconds["c"]).n == 2


def test_ratios_are_taken_within_a_round() -> None:
    """In a slow round both are slow: the ratio is 2 although the medians' ratio is not."""
    assert ratios([2.0, 20.0, 6.0], [1.0, 10.0, 3.0]) == Spread(2, 2, 2, 3)
    assert ratios([4.0, None, 9.0], [1.0, 5.0, 3.0]) == Spread(3.5, 3, 4, 2)


def test_the_results_are_a_table_of_cases(soft_llama: Subject) -> None:
    rows = bench(soft_llama, lengths=(N, 96), names=("posleak", "eager"), repeats=2, peers_up_to=N).as_dict()["cases"]
    assert [(row["name"], row["length"]) for row in rows] == [
        ("forward", N), ("posleak", N), ("eager", N), ("forward", 96), ("posleak", 96),
    ]  # fmt: skip
    for row in rows:
        assert row["n"] == 2
        assert row["seconds_range"][0] <= row["seconds"] <= row["seconds_range"][1]
        assert row["peak_mb"] is None  # without a way to load the model elsewhere
    assert rows[0]["ratio_to_forward"] == 1
    assert rows[2]["agreement_nats"] < 1e-4
    assert rows[1]["planned_mb"] > 0


def test_a_case_that_cannot_run_does_not_stop_the_others(soft_llama: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(**task: Any) -> dict[str, Any]:
        return {"error": "needs more memory"} if task["case"] == "eager" else {"peak_mb": 5.0}

    monkeypatch.setattr("benchmarks.runner.peak_in_own_process", measured)
    reload = {"model": "m", "loading": {}}
    rows = bench(soft_llama, lengths=(N,), names=("posleak", "eager"), repeats=1, reload=reload).as_dict()["cases"]
    by_name = {row["name"]: row for row in rows}
    assert by_name["eager"]["seconds"] is None
    assert by_name["eager"]["error"] == "needs more memory"
    assert by_name["posleak"]["peak_mb"] == 5


def test_memory_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(str(tmp_path / "llama"))
    task = {"case": "posleak", "length": N, "ids": IDS.tolist(), "model": str(tmp_path / "llama"), "loading": {}}
    assert 0 <= worker.peak_in_own_process(**task)["peak_mb"] < 500
    with raises(CheckError, where="posleak", got="ModelError"):
        worker.peak_in_own_process(**{**task, "model": str(tmp_path / "nothing")})


def test_too_little_memory_is_an_answer_and_other_errors_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(message: str) -> Any:
        def peak(task: dict[str, Any]) -> int:
            raise RuntimeError(message)

        return peak

    monkeypatch.setattr(worker, "_peak", failing("DefaultCPUAllocator: not enough memory: you tried to allocate"))
    assert "3.0 GB" in worker.run_task({}, 3 * 10**9)["error"]
    monkeypatch.setattr(worker, "_peak", failing("shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes"):
        worker.run_task({}, 3 * 10**9)


def test_cases_are_named_or_refused() -> None:
    assert [chosen.name for chosen in chosen_cases(["posleak"])] == ["forward", "posleak"]
    with raises(InputError, got="eagre", expected="posleak trace", remedy="'eager'"):
        chosen_cases(["eagre"])
    missing = [peer for peer in CASES if peer.missing]
    assert not set(missing) & set(chosen_cases([]))
    if missing:
        with raises(InputError, got="transformer-lens", remedy="pip install 'posleak[bench]'"):
            chosen_cases([missing[0].name])


def test_the_page_of_costs_is_made_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("page", ROOT / "benchmarks" / "page.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    sys.modules["page"] = page
    spec.loader.exec_module(page)
    assert page.generated_page() == (ROOT / "docs" / "cost.md").read_text(encoding="utf-8"), (
        "run `python benchmarks/page.py`"
    )


def test_the_shortest_prompts_can_be_timed(tmp_path: Path) -> None:
    """The first pass, which warms up, is no longer than the prompt."""
    tiny("llama").save_pretrained(str(tmp_path / "llama"))
    ids = np.full((1, 32), 5).tolist()
    task = {"model": str(tmp_path / "llama"), "loading": {}, "length": 32, "ids": ids, "case": "posleak"}
    assert worker.run_task(task, 2**40)["peak_mb"] >= 0
