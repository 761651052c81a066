"""Verdicts follow one rule; every claim runs on tiny models; what is found is kept."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from rich.console import Console
from transformers import PreTrainedModel

from posleak.analyses.claims.catalogue import (
    ENOUGH,
    UNTESTED,
    Claim,
    ClaimResult,
    Finding,
    Side,
    Verdict,
    registry,
)
from posleak.analyses.claims.examination import ClaimsRun, claims, examine
from posleak.analyses.claims.lab import Lab
from posleak.analyses.claims.papers.position import rolled_gaps
from posleak.analyses.origin.reading import LayerReading, Reading
from posleak.leakage import Estimate, Jackknife
from posleak.leakage.contrast import depth_slope, slope
from posleak.leakage.power import of_gram
from posleak.leakage.summary import LEADING
from posleak.models import Subject
from posleak.papers import ALL
from posleak.probe import Plan
from posleak.reports.terminal.claims import claims_tables
from posleak.runs.spec import MeasureSpec
from posleak.typed import plain
from support.families import tiny
from tools import claims_docs

numbers = st.floats(-10, 10)


@given(numbers, numbers, numbers, st.sampled_from(Side))
def test_the_interval_alone_decides(a: float, b: float, no_effect: float, side: Side) -> None:
    low, high = min(a, b), max(a, b)
    verdict = Finding((low + high) / 2, low, high, "", ENOUGH, no_effect, side).verdict
    if low <= no_effect <= high:
        assert verdict is Verdict.INCONCLUSIVE
    else:
        claimed = (low > no_effect) == (side is Side.ABOVE)
        assert verdict is (Verdict.SUPPORTED if claimed else Verdict.CONTRADICTED)


@given(st.integers(0, ENOUGH - 1), st.sampled_from(Side))
def test_too_few_prompts_decide_nothing(n: int, side: Side) -> None:
    """However far from no effect the interval lies: at two prompts one seed supported a claim, another refuted it."""
    found = Finding(5.0, 4.0, 6.0, "", n, 0.0, side)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.too_few
    assert not replace(found, n=ENOUGH).too_few


def test_nan_is_inconclusive_and_a_reason_is_not_applicable() -> None:
    assert Finding(math.nan, math.nan, math.nan, "", 1).verdict is Verdict.INCONCLUSIVE
    assert Finding.not_applicable("no BOS").verdict is Verdict.NOT_APPLICABLE


def test_the_registry_covers_every_number_with_unique_names() -> None:
    found = registry()
    assert {claim.number for claim in found} == set(range(1, 16))
    assert [claim.number for claim in found] == sorted(claim.number for claim in found)
    assert len({claim.id for claim in found}) == len(found)
    assert all(claim.sentence.endswith(".") and claim.method for claim in found)
    assert all(0 < len(claim.title) <= 40 and not claim.title.endswith(".") for claim in found)
    assert len({claim.title for claim in found}) == len(found)


def examined(model: PreTrainedModel) -> dict[str, Any]:
    lab = Lab(Subject.of(model, name="tiny"), MeasureSpec(length=64, prompts=16))
    return {result.id: result for result in examine(lab)}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3", "gpt_neox"])
def test_every_claim_runs_on_tiny_models(family: str) -> None:
    found = examined(tiny(family))
    assert found["relative-logits"].verdict is Verdict.SUPPORTED
    assert found["mask.ring"].verdict is Verdict.SUPPORTED
    assert found["mask.ring"].details["with the mask"] > 1e-3
    assert found["closure"].verdict is Verdict.SUPPORTED
    assert found["closure"].details["with the mask off"] > 1e-3
    assert found["fingerprint.no-bos"].verdict is Verdict.NOT_APPLICABLE
    for result in found.values():
        json.dumps(plain(result), allow_nan=False)
        if result.verdict is not Verdict.NOT_APPLICABLE and math.isfinite(result.low):
            assert result.low <= result.effect <= result.high


@pytest.mark.filterwarnings("ignore:origin keys cannot be moved")
def test_learned_positions_contradict_the_ring_and_are_told_apart() -> None:
    model: Any = tiny("gpt2", n_embd=30, n_layer=3, n_head=3, n_inner=41, n_positions=2048)
    model.transformer.wpe.weight.mul_(10)
    found = examined(model)
    assert "no rotary" in found["relative-logits"].reason
    assert "no rotary frequencies" in found["mask.ring"].reason
    assert found["mask.first-layer"].verdict is not Verdict.SUPPORTED


def test_without_a_bos_its_replacement_is_not_applicable() -> None:
    lab = Lab(Subject.of(tiny("llama"), name="llama"), MeasureSpec(length=64, prompts=4, bos="none"))
    chosen = [claim for claim in registry() if claim.number == 8]
    assert all("no BOS" in str(result.reason) for result in examine(lab, chosen))


def test_all_conditions_read_the_same_prompts_and_the_baseline_is_measured_once() -> None:
    said: list[str] = []
    lab = Lab(Subject.of(tiny("llama"), name="llama"), MeasureSpec(length=64, prompts=8), progress=said.append)
    for _ in range(2):
        lab.kept("residual", "bos=zero", early=True)
    assert said.count("baseline") == 1
    assert said.count("bos=zero") == 1
    assert lab.kept("mask", "shift=0").ratio.value == 1
    null = lab.kept("total", "rope=ntk:1").ratio
    assert [float(x) for x in (null.value, null.low, null.high)] == [1, 1, 1]


def test_a_finished_claim_is_kept_when_a_later_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = Subject.of(tiny("llama"), name="llama")
    whole = registry()

    def broken(lab: Lab) -> Finding:
        raise MemoryError("out of luck")

    failing = [*whole[:2], Claim(3, "broken", "It breaks", "It breaks.", "by breaking", broken), *whole[2:4]]
    monkeypatch.setattr("posleak.analyses.claims.examination.registry", lambda paper: failing)
    with pytest.raises(MemoryError, match="out of luck"):
        claims(subject, out=tmp_path / "run", length=64, prompts=4)
    stored = json.loads((tmp_path / "run" / "claims.json").read_text())
    assert [entry["id"] for entry in stored["claims"]] == [claim.id for claim in whole[:2]]

    tested: list[str] = []
    monkeypatch.setattr("posleak.analyses.claims.examination.registry", lambda paper: whole[:4])
    found = claims(subject, out=tmp_path / "run", length=64, prompts=4, progress=tested.append)
    assert [result.id for result in found.results] == [claim.id for claim in whole[:4]]
    assert not any(whole[0].title in line for line in tested)


def test_one_claim_that_breaks_down_does_not_cost_the_verdicts_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As when a model has no kernel for a dtype. The reason names a file with the traceback."""
    monkeypatch.setenv("POSLEAK_CACHE", str(tmp_path))
    whole = registry()

    def broken(lab: Lab) -> Finding:
        raise RuntimeError("expected scalar type BFloat16 but found Double")

    chosen = [Claim(0, "broken", "It breaks", "It breaks.", "by breaking", broken), *whole[1:3]]
    lab = Lab(Subject.of(tiny("llama"), name="llama"), MeasureSpec(length=64, prompts=16))
    first, *others = examine(lab, chosen)
    assert first.verdict is Verdict.NOT_APPLICABLE
    assert first.reason is not None
    assert "expected scalar type BFloat16 but found Double" in first.reason
    kept = Path(first.reason.split("traceback: ")[1].splitlines()[0])
    assert "in broken" in kept.read_text()
    assert all(each.verdict is not Verdict.NOT_APPLICABLE for each in others)


def test_claims_leave_a_whole_run_folder(tmp_path: Path) -> None:
    subject = Subject.of(tiny("llama"), name="llama")
    found = claims(subject, out=tmp_path / "run", length=64, prompts=4)
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert files == {"run.json", "results.nc", "heads.parquet", "claims.json", "origin.json", "origin.nc", "conditions"}
    assert len(found.results) == len(registry())
    keys = {"id", "claim", "verdict", "effect", "low", "high", "unit", "method"}
    assert all(keys <= set(entry) for entry in found.as_dict()["claims"])
    values = {"supported", "contradicted", "inconclusive", "not applicable"}
    assert {result.verdict.value for result in found.results} <= values


def test_a_planted_trend_is_found() -> None:
    """Layer l has power l / 3 in every prompt: slope 2 per relative depth over seven layers, 2 of their mean."""
    powers = Jackknife(5).inner(of_gram(np.arange(7)[:, None, None] / 3 * np.ones((7, 5, 5))))
    absolute, relative = (found.estimate for found in depth_slope(powers))
    assert float(absolute.value) == pytest.approx(2.0)
    assert np.isnan(absolute.low), "prompts that do not differ have no interval"
    assert float(relative.value) == pytest.approx(2.0)
    some, _ = depth_slope(powers, [0, 3, 6])
    assert float(some.value) == pytest.approx(2.0)
    assert slope(np.full(7, 3.0), np.linspace(0, 1, 7)) == pytest.approx(0.0)


def test_the_ring_needs_both_its_sides() -> None:
    """Only without the mask and with snapped frequencies does rolling commute with the model."""
    model, ids = tiny("llama", dtype=torch.float64), torch.randint(3, 101, (1, 64))
    assert max(rolled_gaps(model, ids, ["ring"])) < 1e-12
    assert max(rolled_gaps(model, ids, ["mask=off"])) > 1e-9
    assert max(rolled_gaps(model, ids, [])) > 1e-3


def test_rolled_prompts_are_judged_one_by_one() -> None:
    """A constant prompt is its own roll, also in a batch with others."""
    model, ids = tiny("llama", dtype=torch.float64), torch.randint(3, 101, (3, 64))
    ids[1] = 7
    together = rolled_gaps(model, ids, ["mask=off", "rope=none"])
    assert together[1] < 1e-12
    masked = rolled_gaps(model, ids, [])
    assert masked == pytest.approx([rolled_gaps(model, row[None], [])[0] for row in ids], rel=1e-6)


@pytest.mark.parametrize("side", list(Side))
def test_there_is_no_verdict_without_an_interval(side: Side) -> None:
    """Two prompts give a value and no interval, however large the value is."""
    found = Finding.of(Jackknife(2).mean(np.array([1.11, 1.12])).estimate, "1", side=side)
    assert found.effect == pytest.approx(1.115)
    assert math.isnan(found.low)
    assert found.verdict is Verdict.INCONCLUSIVE


# -- norms ----------------------------------------------------------------------------------------------------------


@cache
def llama_lab() -> Lab:
    return Lab(Subject.of(tiny("llama"), name="llama"), MeasureSpec(length=64, prompts=16))


def test_conditions_are_weighted_by_the_attention_of_the_baseline() -> None:
    """The edit changes where attention goes; a power that it does not change must not change with the weights."""
    lab = llama_lab()
    ordinary, edited = lab.run(), lab.run("bos=zero")
    products = edited.weighted_by(ordinary)["all"]
    for norm, expected in products.norms.items():
        lab.norm = norm
        found = lab.products("bos=zero").own["mask"]
        assert np.array_equal(found, expected.own["mask"], equal_nan=True)
    lab.norm = LEADING
    assert not np.allclose(products.own["mask"], edited.products["all"].own["mask"])
    assert lab.products("bos=zero") is lab.products("bos=zero"), "computed once"


def test_a_claim_about_powers_has_the_evenly_weighted_effect_too() -> None:
    lab = llama_lab()
    chosen = {claim.id: claim for claim in registry() if claim.id in ("leakage", "closure", "isolation.origin")}
    found = {result.id: result for result in examine(lab, list(chosen.values()))}
    assert lab.norm == LEADING
    total = lab.run().summary.model["all"]
    assert found["leakage"].effect == pytest.approx(float(total.power["total"].value))
    assert total.even is not None
    even = found["leakage"].details["even"]
    assert isinstance(even, Estimate)
    assert float(even.value) == pytest.approx(float(total.even.power["total"].value))
    assert "even" not in found["closure"].details
    assert plain(found["closure"])["even_verdict"] is None
    assert plain(found["leakage"])["even_verdict"] == "supported"


def test_a_verdict_that_depends_on_the_norm_is_named() -> None:
    below, above = (Estimate(np.asarray(x), np.asarray(x - 1), np.asarray(x + 1), ENOUGH) for x in (-3.0, 3.0))
    same, other = (Finding(3.0, 2.0, 4.0, "", ENOUGH, details={"even": even}) for even in (above, below))
    assert same.even_verdict is same.verdict is Verdict.SUPPORTED
    assert same.disagreement is None
    assert other.even_verdict is Verdict.CONTRADICTED
    assert "contradicted" in str(other.disagreement)
    few = replace(other, n=3, details={"even": replace(below, n=3)})
    assert few.disagreement is None, "too few prompts decide nothing in either norm"


def test_the_norm_of_a_test_that_fails_is_put_back() -> None:
    lab = llama_lab()

    def broken(lab: Lab) -> Finding:
        power = lab.power("total")
        if lab.norm != LEADING:
            raise RuntimeError("in the second norm")
        return Finding.of(power.estimate, "nats²")

    with pytest.raises(RuntimeError, match="second norm"):
        lab.tested(broken)
    assert lab.norm == LEADING


def test_isolation_comes_from_the_branches_of_the_trace() -> None:
    lab = llama_lab()
    trace = lab.trace
    found = {result.id: result for result in examine(lab, [claim for claim in registry() if claim.number == 5])}
    assert {texts for texts in lab._runs if "context" in "".join(texts)} == {("context=branches",)}, "one pass for all"
    numbers = trace.model["all"]
    origin = found["isolation.origin"]
    assert origin.effect == float(numbers.share["origin"].value)
    assert origin.low == float(numbers.share["origin"].low)
    assert {"earlier", "here", "left", "order", "even"} <= set(origin.details)
    lent = Jackknife(16).inner(trace.branches.weighted_by(trace.ordinary)["all"].averaged((0, 1)).own["left"])
    total = float(numbers.power["total"].value)
    assert found["isolation.total"].effect == pytest.approx(1 - float(lent.value) / total)
    direct = trace.branches.weighted_by(trace.ordinary)["all"].own["residual"][1:].mean((0, 1))
    kept = lab.power("residual", lab.branches, layers=slice(1, None))
    assert float(kept.value) == pytest.approx(float(Jackknife(16).inner(direct).value))
    edited = found["isolation.downstream"].edited
    assert edited is not None
    assert [(each.queries, each.layers) for each in edited.kept] == [(q, "after the first") for q in ("all", "early")]


@pytest.mark.filterwarnings("ignore:origin keys cannot be moved")
def test_isolation_is_not_applicable_where_branches_are_not_defined() -> None:
    model = tiny("gpt2", n_embd=30, n_layer=3, n_head=3, n_inner=41, n_positions=2048)
    lab = Lab(Subject.of(model, name="tiny"), MeasureSpec(length=64, prompts=4))
    found = list(examine(lab, [claim for claim in registry() if claim.number == 5]))
    assert len(found) == 3
    assert all(result.reason for result in found)


def test_what_sink_heads_write_is_a_mean_over_heads_in_every_replicate() -> None:
    """The interval of the mean over heads that vary against each other is shorter than the mean of their intervals."""
    rng = np.random.default_rng(0)
    swing = rng.standard_normal(16) / 10
    layers = [
        LayerReading(
            attention=torch.full((16, 2, 5), 0.5, dtype=torch.float64) + torch.rand(16, 2, 5, dtype=torch.float64) / 9,
            written=torch.from_numpy(np.stack([0.5 + swing, 0.5 - swing], axis=1)),
            along=torch.rand(16, 2, dtype=torch.float64), values=torch.rand(16, 2, 3, dtype=torch.float64),
        )
    ]  # fmt: skip
    plan = Plan(length=8, origin=1, queries=(2, 3, 4), references=(6, 7), offsets=(0, 1))
    projections = [SimpleNamespace(call=0, layer=0, heads=2, space="output", name=None)]
    reading = Reading.from_batches([layers], plan, cast(Any, projections))
    subject = Subject.of(tiny("llama"), name="llama")
    lab = Lab(subject, MeasureSpec(length=64, prompts=16))
    lab.__dict__["origin"] = SimpleNamespace(reading=reading)
    (writes,) = (claim for claim in registry() if claim.id == "sink-heads.writes")
    found = writes.test(lab)
    assert found.effect == pytest.approx(0.5)
    assert found.n == 16
    widths = [float(head.written.high - head.written.low) for head in reading.heads]
    assert len(widths) == 2
    assert not found.high - found.low > min(widths) / 10


def test_choices_after_data_are_named_where_a_claim_has_them() -> None:
    decided = {claim.id: claim.decided for claim in registry()}
    assert "norm" in str(decided["leakage"])
    assert "5%" in str(decided["mask.first-layer"])
    assert decided["fingerprint.fixed"] is None
    result = ClaimResult.about(registry()[1], Finding(1.0, 0.5, 1.5, "", 16))
    assert plain(result)["decided"] == registry()[1].decided


def test_the_table_names_the_other_verdict_and_counts_later_choices() -> None:
    even = Estimate(np.asarray(-3.0), np.asarray(-4.0), np.asarray(-2.0), ENOUGH)
    leakage = next(claim for claim in registry() if claim.id == "leakage")
    result = ClaimResult.about(leakage, Finding(3.0, 2.0, 4.0, "nats²", ENOUGH, details={"even": even}))
    console = Console(width=200, file=io.StringIO())
    for item in claims_tables(ClaimsRun(llama_lab().run(), (result,))):
        console.print(item)
    text = cast(io.StringIO, console.file).getvalue()
    assert "evenly weighted: contradicted" in " ".join(text.split())
    assert "1 of 1 claims" in text


def test_the_page_of_claims_separates_rules_from_later_choices() -> None:
    page = claims_docs.page({})
    before = page.partition("## Fixed before data were seen")[2].partition("\n## ")[0]
    after = page.partition("## Chosen after data had been seen")[2].partition("\n## ")[0]
    for claim in registry(ALL):
        tested = claim.method != UNTESTED
        assert (f"`{claim.id}`" in before) == (tested and claim.decided is None), claim.id
        assert (f"`{claim.id}`" in after) == (claim.decided is not None), claim.id
