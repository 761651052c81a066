"""Claims belong to papers: which are tested, what is kept of others, and the tests of those that read metrics.

The metrics are planted: arrays of a model that is known to have, or not to have, what a claim says.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from numpy.typing import NDArray

import posleak as pl
from posleak import papers
from posleak.analyses.claims import catalogue
from posleak.analyses.claims.catalogue import REGISTRY, Claim, ClaimResult, Finding, Side, Verdict, claim, registry
from posleak.analyses.claims.examination import FINDINGS, claims, examine, examined
from posleak.analyses.claims.lab import Lab
from posleak.analyses.claims.papers.sinks import TYPES, uniform_concentration
from posleak.errors import InputError, UnsupportedError
from posleak.leakage import Jackknife
from posleak.leakage.contrast import correlated, correlation, mean_difference, octave_cosines
from posleak.models import Subject
from posleak.papers import ALL, OWN_CLAIMS, PAPERS, Paper, by_paper, named_papers
from posleak.runs.run import Run
from posleak.runs.spec import MeasureSpec
from posleak.typed import from_json, plain
from support.errors import raises
from support.families import tiny
from support.runs_tiny import assert_same_bits, counted_passes

pytestmark = pytest.mark.filterwarnings("ignore:the sink rate on natural text is left out")  # no tokenizer

PROMPTS, LAYERS, HEADS, SCALES = 16, 6, 4, 5
Array = NDArray[np.float64]


# -- papers ---------------------------------------------------------------------------------------------------------


def test_every_paper_has_claims_under_its_name() -> None:
    found = {name: [each for each in registry(name) if each.paper == name] for name in PAPERS}
    assert list(found) == ["position", "sinks", "wavelets", "posleak"]
    assert [len(some) for some in found.values()] == [29, 10, 8, 4]
    assert registry(None) == [each for some in found.values() for each in some]
    assert registry(ALL) == [each for each in registry(None) if each.paper != OWN_CLAIMS], "a circuit takes longer"
    for some in found.values():
        assert {each.number for each in some} == set(range(1, some[-1].number + 1))
    assert len({each.title for each in registry(None)}) == len(registry(None))
    assert all(0 < len(each.title) <= 40 and each.sentence.endswith(".") and each.method for each in registry(None))


@pytest.mark.parametrize("call", [named_papers, registry, lambda name: pl.claims("no-such-model", paper=name)])
def test_an_unknown_paper_gets_the_nearest_name(call: Callable[[str], Any]) -> None:
    with raises(InputError, where="--paper", got="wavelet", remedy="'wavelets'"):
        call("wavelet")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registries that may be changed."""
    registry(ALL)
    monkeypatch.setattr(catalogue, "REGISTRY", dict(REGISTRY))
    copied = dict(PAPERS)
    for module in (catalogue, papers):
        monkeypatch.setattr(module, "PAPERS", copied)


def nothing(lab: Lab) -> Finding:
    return Finding.not_applicable("nothing is tested")


@pytest.mark.usefixtures("own")
def test_a_claim_may_bring_its_paper_and_one_without_is_tested_always() -> None:
    mine = Paper("mine", "A title of mine", "2601.00001")
    claim(100, "of-mine", "Mine", "Mine.", "not at all", paper=mine)(nothing)
    claim(101, "of-none", "None's", "None's.", "not at all")(nothing)
    claim(50, "of-theirs", "Theirs", "Theirs.", "not at all", paper="sinks")(nothing)
    assert [each.id for each in registry("mine")] == ["of-mine", "of-none"]
    assert [each.id for each in registry("sinks")][-2:] == ["of-theirs", "of-none"]
    assert [each.id for each in registry(ALL)][-2:] == ["of-mine", "of-none"]
    assert [each.id for each in registry() if each.paper is None] == ["of-none"]
    assert named_papers(ALL)[-1] == "mine"
    claim(100, "of-mine", "Mine", "Mine.", "not at all", paper=mine)(nothing)


@pytest.mark.usefixtures("own")
def test_a_name_that_posleak_uses_is_no_name_for_another_paper() -> None:
    for taken in ("sinks", ALL):
        with raises(InputError, what="built-in", got=taken):
            claim(100, "mine", "Mine", "Mine.", "not at all", paper=Paper(taken, "Other sinks"))
    with raises(InputError, where="claim mine", got="sink", remedy=("'sinks'", "Paper(name, title)")):
        claim(100, "mine", "Mine", "Mine.", "not at all", paper="sink")
    assert "mine" not in [each.id for each in registry(ALL)]


def result(paper: str | None) -> ClaimResult:
    made = Claim(1, f"of-{paper}", "A title", "A sentence.", "not at all", nothing, paper)
    return ClaimResult.about(made, Finding.not_applicable("for no reason"))


def test_groups_have_the_headings_of_their_papers() -> None:
    found = by_paper([result("sinks"), result(None), result("gone"), result("sinks")])
    headings = ["What are you sinking? A geometric approach on attention sink (arXiv 2508.02546)", papers.OWN, "gone"]
    assert list(found) == headings
    assert [len(some) for some in found.values()] == [2, 1, 1]
    assert Paper("a", "Without a number").heading == "Without a number"


# -- a folder, one paper after the other ----------------------------------------------------------------------------


def lab_at(subject: Subject, folder: Path | None = None) -> Lab:
    """Its metrics are planted."""
    lab = Lab(subject, MeasureSpec(length=48, prompts=4), folder)
    lab.__dict__["metrics"] = planted(prompts=4, layers=3)
    return lab


def test_a_folder_keeps_what_it_has_and_gets_the_rest(llama: Subject, tmp_path: Path) -> None:
    first = claims(llama, out=tmp_path, length=48, prompts=4)
    assert {each.paper for each in first.results} == {"position"}
    assert [paper.name for paper in first.papers] == ["position"]
    runs = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("results.nc")}

    said: list[str] = []
    lab = lab_at(llama, tmp_path)
    lab.progress = said.append
    whole = examined(lab, ALL)
    assert [each.id for each in whole.results] == [each.id for each in registry(ALL)]
    assert plain(whole.results[: len(first.results)]) == plain(first.results)
    assert not any(each.title in line for each in registry() for line in said), "no claim was tested twice"
    assert {path: path.stat().st_mtime_ns for path in runs} == runs
    assert len(FINDINGS.read(tmp_path / "claims.json").claims) == len(registry(ALL))
    assert [paper["name"] for paper in whole.as_dict()["papers"]] == [name for name in PAPERS if name != OWN_CLAIMS]

    again = examined(lab_at(llama, tmp_path), "sinks")
    assert {each.paper for each in again.results} == {"sinks"}
    assert len(FINDINGS.read(tmp_path / "claims.json").claims) == len(registry(ALL)), "others' findings stay"


def test_findings_of_before_papers_had_names_are_about_the_first(llama: Subject, tmp_path: Path) -> None:
    examined(lab_at(llama, tmp_path), "sinks")
    stored = FINDINGS.read(tmp_path / "claims.json")
    assert {each.paper for each in stored.claims} == {"sinks"}
    text = json.loads((tmp_path / "claims.json").read_text())
    older = [{name: value for name, value in each.items() if name != "paper"} for each in text["claims"]]
    assert {each.paper for each in from_json(tuple[ClaimResult, ...], json.dumps(older))} == {"position"}


def test_a_page_of_several_papers_has_a_heading_for_each(llama: Subject, tmp_path: Path) -> None:
    examined(lab_at(llama, tmp_path / "run"), ALL)
    page = pl.report(tmp_path / "run", tmp_path / "page.html").read_text(encoding="utf-8")
    for name, paper in PAPERS.items():
        assert page.count(f"<h4>{paper.heading}</h4>") == (name != OWN_CLAIMS)
    assert "--paper all" in page
    examined(lab_at(llama, tmp_path / "other"), "sinks")
    page = pl.report(tmp_path / "other", tmp_path / "other.html").read_text(encoding="utf-8")
    assert not any(f"<h4>{paper.heading}</h4>" in page for paper in PAPERS.values())
    assert "--paper sinks" in page


# -- claims that read metrics ---------------------------------------------------------------------------------------


def planted(prompts: int = PROMPTS, layers: int = LAYERS, seed: int = 0, **other: Any) -> xr.Dataset:
    """Metrics of a model with a sink in its later layers and heads that prefer different scales; `other` replaces some.

    All get a little noise: prompts must differ.
    """
    rng = np.random.default_rng(seed)
    depth = np.linspace(0, 1, layers)
    preferred = np.linspace(0.5, SCALES - 1.5, layers * HEADS).reshape(layers, HEADS, 1)
    energy = np.exp(-np.abs(np.arange(SCALES) - preferred) * 2)
    sharp = np.linspace(1, 4, layers * HEADS).reshape(layers, HEADS)
    found: dict[str, Any] = {
        "concentration": 0.6 + 0.3 * depth, "anchors": (depth > 0).astype(float), "star": 0.1 + 0.8 * depth,
        "centralized": 0.8 + 0 * depth, "distributed": 0.2 + 0 * depth, "bidirectional": 0 * depth,
        "profile": (0.05 + 0.8 * depth)[:, None] + np.zeros(HEADS), "sink_start": np.full((layers, HEADS), 0.5),
        "wavelet_energy": energy / energy.sum(-1, keepdims=True), "scale_half": np.full((layers, HEADS), 0.05),
        "scale_quarter": np.full((layers, HEADS), 0.1), "entropy_position": sharp, "entropy_spectrum": 6 - sharp,
    } | other  # fmt: skip
    arrays = {name: _noisy(name, np.asarray(value, dtype=float), prompts, rng) for name, value in found.items()}
    return xr.Dataset(arrays, coords={"threshold": [0.001, 0.01, 0.05, 0.1, 0.2]})


def _noisy(name: str, value: Array, prompts: int, rng: np.random.Generator) -> xr.DataArray:
    if name == "anchors":
        array = np.repeat(value[None], prompts, axis=0)
        array[:2, 1] = 0  # two prompts have none in the second layer
    else:
        array = value * (1 + 0.02 * rng.standard_normal((prompts, *value.shape)))
    dims = ["prompt", "layer", *(("head",) if array.ndim > 2 else ()), *(("scale",) if array.ndim > 3 else ())]
    if name == "profile":
        return xr.DataArray(np.stack([array, array / 9], axis=-1), dims=[*dims, "position"])
    if name == "wavelet_energy":
        return xr.DataArray(array / array.sum(-1, keepdims=True), dims=dims)
    if name == "star":
        steps = np.array([0.5, 0.3, 0.2, 0.0, -0.1])  # of the five thresholds
        return xr.DataArray(array[..., None] + steps, dims=[*dims, "threshold"])
    return xr.DataArray(array, dims=dims)


@cache
def six_layers(family: str = "llama") -> Subject:
    shape: dict[str, Any] = (
        {"n_embd": 30, "n_layer": LAYERS, "n_head": 3, "n_inner": 41, "n_positions": 2048}
        if family == "gpt2"
        else {"num_hidden_layers": LAYERS}
    )
    return Subject.of(tiny(family, **shape), name=family)


def outcome(id: str, family: str = "llama", **other: Any) -> ClaimResult:
    """What a claim finds in planted metrics."""
    lab = Lab(six_layers(family), MeasureSpec(length=64, prompts=PROMPTS))
    lab.__dict__["metrics"] = planted(**other)
    (chosen,) = (each for each in registry(ALL) if each.id == id)
    (found,) = examine(lab, [chosen])
    json.dumps(plain(found), allow_nan=False)
    return found


def by_depth(first: float, last: float) -> Array:
    return np.linspace(first, last, LAYERS)


def same_heads() -> Array:
    return np.tile(np.array([0.1, 0.2, 0.4, 0.2, 0.1]), (LAYERS, HEADS, 1))


def one_scale_each() -> Array:
    """Heads of four kinds, each with nearly all of its energy on a scale of its own."""
    kinds = np.eye(SCALES)[:4] + 0.02
    return np.resize(kinds / kinds.sum(-1, keepdims=True), (LAYERS, HEADS, SCALES))


def self_similar() -> Array:
    """Each head is a power law: its energy changes by one factor from scale to scale, another for each head."""
    factor = np.linspace(0.3, 3, LAYERS * HEADS).reshape(LAYERS, HEADS, 1)
    energy = factor ** np.arange(SCALES)
    return np.asarray(energy / energy.sum(-1, keepdims=True))


YES, NO = Verdict.SUPPORTED, Verdict.CONTRADICTED

PLANTED: list[tuple[str, dict[str, Any], Verdict]] = [
    ("sinks.tokens", {}, YES),
    ("sinks.tokens", {"concentration": by_depth(0.1, 0.6)}, NO),
    ("sinks.every-layer", {}, YES),
    ("sinks.every-layer", {"concentration": np.array([0.9, 0.9, 0.9, 0.2, 0.9, 0.9])}, NO),
    ("sinks.position-0", {}, YES),
    ("sinks.position-0", {"profile": np.full((LAYERS, HEADS), 0.01)}, NO),
    ("sinks.frames", {}, YES),
    ("sinks.frames", {"anchors": np.eye(LAYERS)[1]}, NO),
    ("sinks.type", {}, YES),
    ("sinks.correlate", {}, YES),
    ("sinks.correlate", {"star": by_depth(0.9, 0.1)}, NO),
    ("wavelets.resolutions", {"wavelet_energy": one_scale_each()}, YES),
    ("wavelets.resolutions", {"wavelet_energy": same_heads()}, NO),
    ("wavelets.scale-invariance", {"wavelet_energy": self_similar()}, YES),
    ("wavelets.scale-invariance", {"wavelet_energy": same_heads()}, NO),
    ("wavelets.scale-invariance", {"wavelet_energy": one_scale_each()}, NO),
    ("wavelets.uncertainty", {}, YES),
    ("wavelets.uncertainty", {"entropy_spectrum": np.linspace(1, 4, LAYERS * HEADS).reshape(LAYERS, HEADS)}, NO),
]  # fmt: skip


@pytest.mark.parametrize(("id", "other", "verdict"), PLANTED)
def test_a_claim_finds_what_was_planted(id: str, other: dict[str, Any], verdict: Verdict) -> None:
    found = outcome(id, **other)
    assert found.verdict is verdict, (found.effect, found.low, found.high, found.no_effect)
    assert found.low < found.effect < found.high
    assert found.n == PROMPTS


def test_the_layer_that_fails_is_named() -> None:
    found = outcome("sinks.every-layer", concentration=np.array([0.1, 0.9, 0.9, 0.2, 0.9, 0.9]))
    assert found.details["layer"] == 3
    assert found.effect == pytest.approx(0.2, rel=0.05)


@pytest.mark.parametrize("kind", TYPES)
def test_the_type_of_the_frame_is_named_for_the_model_and_for_each_layer(kind: str) -> None:
    none, some = np.full(LAYERS, 0.1), np.full(LAYERS, 0.8)
    some[0] = none[0] = np.nan  # no anchor in the first layer
    shares: dict[str, Any] = {name: some if name == kind else none for name in TYPES}
    found = outcome("sinks.type", **shares)
    assert found.verdict is YES
    assert found.details["type"] == kind
    assert found.details["by layer"] == ", ".join(["0 none", *(f"{layer} {kind}" for layer in range(1, LAYERS))])
    assert found.effect == pytest.approx(0.7, rel=0.05)


def test_an_undecided_type_is_undecided_and_no_anchor_is_no_type() -> None:
    half = np.full(LAYERS, 0.5)
    found = outcome("sinks.type", centralized=half, distributed=half)
    assert found.verdict is Verdict.INCONCLUSIVE
    gone: dict[str, Any] = dict.fromkeys(TYPES, np.full(LAYERS, np.nan))
    found = outcome("sinks.type", **gone)
    assert found.verdict is Verdict.NOT_APPLICABLE
    assert "anchor" in str(found.reason)


@pytest.mark.filterwarnings("ignore:origin keys cannot be moved")
def test_only_a_model_without_rope_can_tell_that_rope_alone_does_it() -> None:
    """A counterexample contradicts; and what is claimed of RoPE models is not asked of others."""
    assert "without RoPE" in str(outcome("wavelets.rope-only").reason)
    found = outcome("wavelets.rope-only", "gpt2", wavelet_energy=self_similar())
    assert (found.verdict, found.side) == (NO, Side.ABOVE)
    assert outcome("wavelets.rope-only", "gpt2", wavelet_energy=same_heads()).verdict is YES
    for id in ("wavelets.resolutions", "wavelets.scale-invariance", "wavelets.uncertainty"):
        assert "rotary" in str(outcome(id, "gpt2").reason)


def test_heads_that_a_layer_lacks_and_heads_without_a_profile_are_left_out() -> None:
    energy = planted()["wavelet_energy"].values[0]
    fewer = energy.copy()
    fewer[2, 1:] = np.nan
    found, fewer_found = (outcome("wavelets.resolutions", wavelet_energy=each) for each in (energy, fewer))
    assert found.details["heads"] == LAYERS * HEADS
    assert fewer_found.details["heads"] == LAYERS * HEADS - (HEADS - 1)
    assert math.isfinite(fewer_found.effect)
    gone = np.full_like(energy, np.nan)
    assert "three heads" in str(outcome("wavelets.resolutions", wavelet_energy=gone).reason)


def test_prompts_that_are_too_short_for_a_profile_are_a_reason() -> None:
    lab = Lab(six_layers(), MeasureSpec(length=64, prompts=PROMPTS))
    lab.__dict__["metrics"] = planted().drop_vars("wavelet_energy")
    chosen = [each for each in registry("wavelets") if each.id == "wavelets.resolutions"]
    (found,) = examine(lab, chosen)
    assert "too short" in str(found.reason)


def test_what_one_checkpoint_cannot_tell_has_its_reason() -> None:
    lab = Lab(six_layers(), MeasureSpec(length=64, prompts=PROMPTS))
    silent = [each for each in registry(ALL) if each.method.startswith("not tested")]
    found = list(examine(lab, silent))
    assert len(found) == 9
    assert {each.verdict for each in found} == {Verdict.NOT_APPLICABLE}
    assert all(len(str(each.reason)) > 40 for each in found)
    assert lab._runs == {}, "nothing was measured for them"


def test_metrics_are_measured_once_beside_a_baseline_that_has_none(llama: Subject, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"out": tmp_path, "length": 64, "prompts": 4}
    claims(llama, **asked)
    found = claims(llama, paper=ALL, **asked)
    read = [each for each in found.results if each.paper != "position" and each.reason is None]
    assert {each.paper for each in read} == {"sinks", "wavelets"}
    assert all(math.isfinite(each.effect) for each in read)
    assert "wavelet_energy" not in found.run.data
    metrics = Run.load(tmp_path / "conditions" / "metrics")
    assert np.array_equal(metrics.data["profile"].values, found.run.data["profile"].values, equal_nan=True)
    with counted_passes(llama.model) as passes:
        again = claims(llama, paper=ALL, **asked)
    assert passes == []
    assert plain(again.results) == plain(found.results)


def test_a_new_baseline_has_the_metrics_that_its_claims_read(llama: Subject, tmp_path: Path) -> None:
    """The claims of sinks cost the forward passes of one measurement, and the numbers are those of two."""
    asked: dict[str, Any] = {"length": 64, "prompts": 4}
    with counted_passes(llama.model) as expected:
        measured = pl.measure(llama, metrics="all", **asked)
    with counted_passes(llama.model) as passes:
        together = claims(llama, paper="sinks", out=tmp_path / "together", **asked)
    assert passes == expected
    assert_same_bits(together.run, measured)
    assert not (tmp_path / "together" / "conditions").exists()
    pl.measure(llama, out=tmp_path / "apart", **asked)
    apart = claims(llama, paper="sinks", out=tmp_path / "apart", **asked)
    assert (tmp_path / "apart" / "conditions" / "metrics" / "run.json").is_file()
    assert plain(together.results) == plain(apart.results)


def test_a_baseline_with_metrics_serves_whoever_needs_none(llama: Subject, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"length": 64, "prompts": 4, "out": tmp_path}
    baseline = claims(llama, paper="sinks", **asked).run
    with counted_passes(llama.model) as passes:
        again = pl.measure(llama, **asked)
    assert passes == []
    assert again.record == baseline.record
    assert plain(pl.trace(llama, **asked).model) == plain(pl.trace(llama, **{**asked, "out": None}).model)
    assert claims(llama, **asked).run.record == baseline.record


@pytest.mark.parametrize("out", [False, True])
def test_metrics_that_fail_leave_the_other_claims(
    llama: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: bool
) -> None:
    def broken(*_: object) -> None:
        raise UnsupportedError("this meter does not know the model")

    monkeypatch.setattr("posleak.runs.prepared.meters_of", lambda spec: broken() if spec.metrics else None)
    found = claims(llama, paper=ALL, length=64, prompts=4, out=tmp_path / "run" if out else None)
    by_paper = {name: [each for each in found.results if each.paper == name] for name in ("position", "sinks")}
    assert any(math.isfinite(each.effect) for each in by_paper["position"])
    assert any("this meter does not know the model" in str(each.reason) for each in by_paper["sinks"])
    assert found.run.record.spec.metrics == ()


# -- arithmetic -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [32, 48, 64, 100, 256])
def test_even_attention_gives_the_most_read_tenth_what_it_is_said_to(tokens: int) -> None:
    """Against the matrix itself, and the integral that it comes close to."""
    attention = np.tri(tokens) / np.arange(1, tokens + 1)[:, None]
    np.fill_diagonal(attention, 0)
    received = attention.sum(0)
    most = received[received >= np.percentile(received, 90)]
    assert uniform_concentration(tokens) == pytest.approx(most.sum() / received.sum())
    assert uniform_concentration(10**5) == pytest.approx((1 + math.log(10)) / 10, rel=1e-3)


def test_numbers_across_heads_are_what_loops_give() -> None:
    rng = np.random.default_rng(3)
    x, y, energy = rng.random(7), rng.random(7), rng.random((7, 5))
    pairs = [(g, h) for g in range(7) for h in range(7) if g != h]
    assert correlation(x, y) == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert np.isnan(correlation(x, np.ones(7)))
    assert mean_difference(x) == pytest.approx(np.mean([abs(x[g] - x[h]) for g, h in pairs]))

    def cosine(a: Array, b: Array) -> float:
        return float(a @ b / np.sqrt((a @ a) * (b @ b)))

    itself, other = octave_cosines(energy)
    assert itself == pytest.approx(np.mean([cosine(each[1:], each[:-1]) for each in energy]))
    assert other == pytest.approx(np.mean([cosine(energy[g][:-1], energy[h][:-1]) for g, h in pairs]))
    assert octave_cosines(2.0 ** -np.arange(5) * np.ones((3, 1)))[0] == pytest.approx(1)


def test_the_interval_of_a_correlation_stays_within_its_bounds() -> None:
    rng = np.random.default_rng(5)
    x, y = rng.standard_normal((2, PROMPTS, 4))
    found = correlated(Jackknife(PROMPTS), x, y)
    assert found.value == pytest.approx(np.corrcoef(x.mean(0), y.mean(0))[0, 1])
    assert -1 <= found.low < found.value < found.high <= 1
    assert correlated(Jackknife(PROMPTS), x, 2 * x).value == pytest.approx(1)
    assert np.isnan(correlated(Jackknife(PROMPTS), x, 0 * y).value)


def test_a_function_of_means_has_the_replicates_of_the_means() -> None:
    """For a linear function it is the plain mean; else each replicate is the function of the mean without prompts."""
    x = np.random.default_rng(4).random((6, 3))
    jackknife = Jackknife(6)
    plain, linear = jackknife.mean(x), jackknife.of_means(lambda mean: mean, x)
    np.testing.assert_allclose(linear.value, plain.value)
    np.testing.assert_allclose(linear.samples, plain.samples)
    squared = jackknife.of_means(lambda mean, other: mean @ other, x, x[:, ::-1])
    np.testing.assert_allclose(squared.samples[:6], [(m := np.delete(x, i, 0).mean(0)) @ m[::-1] for i in range(6)])
    assert np.isnan(Jackknife(1).of_means(lambda mean: mean.sum(), x[:1]).estimate.low)
