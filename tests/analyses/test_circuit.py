"""The circuit: ranking by gradients, evidence by intervention, planted writers, resumption, JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import stdtrit

import posleak as pl
from posleak.analyses.circuit import Circuit
from posleak.analyses.circuit.carrier import _states
from posleak.analyses.circuit.circuit import CIRCUIT_FILE, _doubts
from posleak.analyses.circuit.lending import (
    NO_HEAD,
)
from posleak.analyses.circuit.ranking import rank
from posleak.analyses.circuit.writing import (
    DRAWS,
    SetEffect,
    _edges,
    _readers,
    evaluate,
    random_sets,
    require_branches,
    set_effect,
    sizes,
)
from posleak.edits.direction import PositionEdit
from posleak.errors import CheckError, InputError, PosleakWarning, RunError, UnsupportedError
from posleak.inputs import prepare
from posleak.leakage import Estimate
from posleak.models import Subject
from posleak.runs.folder import STEPS
from posleak.runs.run import Run
from support.circuit_tiny import LENGTH as N, counting, passes, study
from support.errors import raises
from support.families import tiny
from tools.shrink import tiny_model


def estimate(value: float, low: float, high: float, n: int) -> Estimate:
    return Estimate(np.array(value), np.array(low), np.array(high), n)


@pytest.fixture(scope="module")
def planted() -> Circuit:
    return pl.circuit(counting(), length=N, prompts=32)


# Laws


@pytest.mark.parametrize(("family", "seed"), [("llama", 5), ("gpt_oss", 5)])
def test_no_head_removes_nothing_and_all_heads_everything(family: str, seed: int) -> None:
    """L14, exactly: the value and every replicate; with seeds for which what is removed is significant."""
    what = study(Subject.of(tiny(family, seed=seed), name=family), count=24)
    every = what.passes.every_head
    what.measure([NO_HEAD, every], "ends")
    for heads, share in ((NO_HEAD, 0.0), (every, 1.0)):
        _, removed = what.removed(heads)
        assert float(removed.value) == share
        assert set(removed.samples.tolist()) == {share}


def test_a_set_is_measured_once_and_agrees_with_a_measurement() -> None:
    """Against `posleak measure --edit context=borrowed@0.1,1.2`, with weights of the unedited run."""
    subject = Subject.of(tiny("llama"), name="tiny")
    what = study(subject, count=6)
    chosen = frozenset({(0, 1), (1, 2)})
    what.measure([chosen, NO_HEAD], "some")
    asked: dict[str, Any] = {"length": N, "prompts": 6}
    plain = pl.measure(subject, **asked)
    run = pl.measure(subject, **asked, edits="context=borrowed@0.1,1.2")
    for norm, products in run.weighted_by(plain)["all"].norms.items():
        assert what.by_head(chosen, norm) == pytest.approx(products.own["total"], rel=2e-3, abs=1e-4)
    before = len(what._measured)
    what.measure([chosen], "again")
    assert len(what._measured) == before


# Evaluation


def test_gradients_of_a_narrow_model_are_computed_in_float32(planted: Circuit) -> None:
    model: Any = counting().model
    model.to(torch.bfloat16)
    found = pl.circuit(Subject.of(model, name="narrow"), length=N, prompts=32)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}, "restored"
    assert abs(found.writing.attribution.error) < 0.1
    assert [writer.name for writer in found.writing.writers] == [writer.name for writer in planted.writing.writers]


def test_random_sets_match_the_layers_and_leave_out_the_chosen_heads() -> None:
    chosen, counts = [(0, 1), (0, 2), (3, 0)], (9, 9, 9, 9)
    drawn = random_sets(chosen, counts, seed=0)
    assert len(drawn) == DRAWS
    assert len(set(drawn)) > 1
    for heads in drawn:
        assert sorted(call for call, _ in heads) == [0, 0, 3]
        assert not heads & set(chosen)
    assert random_sets(chosen, counts, seed=0) == drawn
    assert random_sets(chosen, counts, seed=1) != drawn
    assert random_sets([(0, 0), (0, 1)], (3,), seed=0) == [], "too few other heads in the layer"


def test_sizes_end_below_the_number_of_heads() -> None:
    assert sizes(270) == [1, 2, 3, 5, 8, 13, 21, 34]
    assert sizes(9) == [1, 2, 3, 5, 8]
    assert sizes(1) == [1]


def test_the_control_is_the_mean_of_its_draws_with_an_interval_over_prompts_and_draws() -> None:
    what = study(counting(), count=16)
    chosen, drawn = frozenset({(0, 1)}), [frozenset({(0, 0)}), frozenset({(0, 2)}), frozenset({(1, 0)})]
    what.measure([NO_HEAD, what.passes.every_head, chosen, *drawn], "some")
    effect = set_effect(what, chosen, None, drawn)
    assert effect.random is not None
    assert effect.difference is not None
    shares = [what.removed(heads)[1] for heads in drawn]
    mean = (shares[0] + shares[1] + shares[2]) / 3
    assert effect.draws == tuple(float(share.value) for share in shares)
    assert effect.random.value == pytest.approx(np.mean(effect.draws))
    assert effect.difference.value == pytest.approx(float(effect.removed.value) - effect.random.value)
    over_draws = float(stdtrit(2, 0.975)) * np.std(effect.draws, ddof=1) / 3**0.5
    for end in ("low", "high"):
        over_prompts = getattr(mean.estimate, end) - mean.value
        assert getattr(effect.random, end) - effect.random.value == pytest.approx(
            np.copysign(np.hypot(over_prompts, over_draws), over_prompts)
        )


def test_two_writers_that_add_up_each_remove_more_than_half_of_the_power() -> None:
    """P is quadratic, so that the shares of two heads with the same output add up to more than 1.

    Neither can replace the other, since what they write is added. So a large share of all other heads does not show
    that these can take over. What remains if all others are lent, 1 − share, shows whether the first heads suffice.
    """
    what = study(counting(writers=(0, 1), strength=0.3), count=128)
    one, other = (frozenset({(0, head)}) for head in (0, 1))
    others = what.passes.every_head - one
    what.measure([NO_HEAD, what.passes.every_head, one, other, others], "halves")
    first, second, rest = (what.removed(heads)[1] for heads in (one, other, others))
    assert (first + second).estimate.low > 1
    assert min(float(x.value) for x in (first, second, rest)) > 0.5
    assert float(first.value) == pytest.approx(float(second.value), rel=1e-3), "both write the same"


def test_branches_that_do_not_agree_with_the_trace_are_an_error(planted: Circuit) -> None:
    """Shown to fail: a study of other prompts, and in bfloat16 one whose heads are all lent where none should be."""
    trace = planted.trace
    right = dataclasses.replace(study(counting(), count=16), weight=trace.ordinary.data["weight"])
    ends = [NO_HEAD, right.passes.every_head]
    right.measure(ends, "ends")
    require_branches(right, trace)
    model: Any = counting().model
    narrow = Subject.of(model.to(torch.bfloat16), name="narrow")
    lent = dataclasses.replace(right, passes=dataclasses.replace(right.passes, subject=narrow))
    lent._measured.update(dict.fromkeys(ends, right._measured[right.passes.every_head]))
    lent._measured[right.passes.every_head] = {
        norm: 0.9 * x for norm, x in right._measured[right.passes.every_head].items()
    }
    for wrong in (dataclasses.replace(study(counting(seed=1), count=16), weight=right.weight), lent):
        wrong.measure(ends, "ends")
        with raises(CheckError, what="branches of the trace", remedy="report"):
            require_branches(wrong, trace)


def test_a_head_that_writes_a_count_is_the_writer(planted: Circuit) -> None:
    (writer,) = planted.writing.writers
    assert (writer.layer, writer.head, planted.writing.reached) == (0, 1, True)
    chosen = planted.writing.chosen
    assert chosen is not None
    effect = chosen.leading
    assert effect.removed.low > 0.8
    assert effect.others is not None
    assert effect.others.high < 0.3
    assert effect.difference is not None
    assert effect.difference.low > 0.5
    assert writer.alone == effect.removed, "the set has one head"
    assert all(reader.layer > 0 for reader in planted.writing.readers[:3])
    assert max(float(edge.share.value) for edge in planted.writing.edges if np.isfinite(edge.share.value)) > 0.5
    assert "1 of 9 heads accounts" in planted.sentences[0]
    assert "the writers alone write most of it" in " ".join(planted.sentences)


def test_the_evidence_is_of_prompts_that_were_not_ranked(planted: Circuit, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranking, the sets and the choice of depths, by the prompts that each of them reads."""
    assert planted.trace.ordinary.prompts == planted.writing.attribution.prompts == 16
    assert planted.writing.removed[0].leading.removed.n == 16
    read: dict[str, list[range]] = {"ranked": [], "measured": [], "states": []}

    def ranked(passes: Any, *args: Any, **kwargs: Any) -> Any:
        read["ranked"].append(passes.indices)
        return rank(passes, *args, **kwargs)

    def measured(what: Any, ranking: Any, *args: Any) -> Any:
        read["measured"].append(what.passes.indices)
        assert np.array_equal(ranking.heads, planted.writing.attribution.heads, equal_nan=True)
        return evaluate(what, ranking, *args)

    def states(conditions: Any, depths: int, prompts: range) -> Any:
        read["states"].append(prompts)
        return _states(conditions, depths, prompts)

    monkeypatch.setattr("posleak.analyses.circuit.circuit.rank", ranked)
    monkeypatch.setattr("posleak.analyses.circuit.circuit.evaluate", measured)
    monkeypatch.setattr("posleak.analyses.circuit.carrier._states", states)
    pl.circuit(counting(), length=N, prompts=32)
    evaluated, other = range(16), range(16, 32)
    assert read["ranked"] == [other, evaluated], "the second one is compared with the first, and orders nothing"
    assert read["measured"] == [evaluated]
    assert read["states"] == [evaluated, other], "depths are chosen on the prompts of the ranking"


def test_attributions_that_do_not_add_up_are_a_warning(planted: Circuit) -> None:
    ranking = planted.writing.attribution
    off = dataclasses.replace(ranking, truth=ranking.sum * 1.2)
    (note,) = _doubts(dataclasses.replace(planted.writing, attribution=off))
    assert f"{off.sum:.3g} nats²" in note
    assert f"{off.truth:.3g}" in note
    near = dataclasses.replace(ranking, truth=ranking.sum * 1.05)
    assert not list(_doubts(dataclasses.replace(planted.writing, attribution=near)))


def test_heads_of_layers_with_two_calls_have_names_of_their_own() -> None:
    """diffllama calls attention twice in each layer: an edge leads to a later layer, not to a later call."""
    model: Any = tiny("diffllama", seed=5, scale=2.0)
    with torch.no_grad():
        next(model.get_input_embeddings().parameters())[1] *= 5
    subject, writers = Subject.of(model, name="two calls"), [(0, 0), (1, 3), (2, 0)]
    trace = pl.trace(subject, length=N, prompts=12)
    readers, ids = _readers(trace), trace.ordinary.summary.layer_ids
    assert ids == (0, 0, 1, 1, 2, 2)
    assert {(reader.layer, reader.name[:2]) for reader in readers} == {(1, "1a"), (1, "1b")}
    what = dataclasses.replace(
        study(subject), passes=dataclasses.replace(passes(subject), heads=trace.ordinary.record.calibration.heads)
    )
    what.measure([NO_HEAD, what.passes.every_head, *(frozenset([head]) for head in writers)], "all")
    edges = list(_edges(what, writers, readers, ids))
    assert {edge.writer for edge in edges} == {0, 1}, "none from the first call of layer 1 to its second call"
    assert len(edges) == 2 * len(readers)


def test_without_significant_leakage_there_are_no_writers() -> None:
    found = pl.circuit(Subject.of(tiny("llama", scale=0.01), name="flat"), length=N, prompts=8)
    assert found.writing.writers == ()
    assert found.writing.chosen is None
    assert "not significantly above 0" in found.sentences[0]
    assert all(np.isnan(row.leading.removed.value) and row.leading.random is None for row in found.writing.removed)


def test_heads_can_be_ranked_by_intervention(planted: Circuit) -> None:
    found = pl.circuit(counting(), length=N, prompts=32, rank="intervene")
    assert found.writing.attribution.method == "intervene"
    assert [writer.name for writer in found.writing.writers] == [writer.name for writer in planted.writing.writers]
    for one, other in zip(found.writing.removed[:1], planted.writing.removed[:1], strict=True):
        assert one.leading.draws == pytest.approx(other.leading.draws, abs=1e-4), "the same random sets"
        assert float(one.leading.removed.value) == pytest.approx(float(other.leading.removed.value), abs=1e-4)


def test_models_with_recurrent_layers_read_copies_apart() -> None:
    found = pl.circuit(Subject.of(tiny_model("falcon_h1"), name="hybrid"), length=N, prompts=8)
    assert found.trace.branches.record.spec.edit_texts == ("context=branches:apart",)
    assert abs(found.writing.attribution.error) < 0.1


# Storage


def fields(x: Any) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(x), default=lambda v: v.tolist()))


def test_a_stopped_circuit_resumes_and_gives_the_same_result(tmp_path: Path, planted: Circuit) -> None:
    asked: dict[str, Any] = {"length": N, "prompts": 32, "out": tmp_path / "run"}
    for work in ("gradients", "first k heads", "random heads"):

        def stop(line: str, work: str = work) -> None:
            if work in line:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            pl.circuit(counting(), progress=stop, **asked)
        assert not (tmp_path / "run" / CIRCUIT_FILE).exists()
    assert list((tmp_path / "run" / STEPS).glob("*.npz"))
    lines = list[str]()
    found = pl.circuit(counting(), progress=lines.append, **asked)
    assert not any("gradients" in line for line in lines), "the rankings were stored"
    assert fields(found.writing) == fields(planted.writing)
    assert not (tmp_path / "run" / STEPS).exists()
    again = pl.circuit(counting(), progress=lambda line: pytest.fail(line) if "sets" in line else None, **asked)
    loaded = Circuit.load(tmp_path / "run")
    assert loaded is not None
    assert again.as_dict() == found.as_dict() == loaded.as_dict()


def test_a_changed_step_is_rejected_and_a_changed_result_too(tmp_path: Path) -> None:
    def stop(line: str) -> None:
        if "random heads" in line:
            raise KeyboardInterrupt

    asked: dict[str, Any] = {"length": N, "prompts": 16, "out": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        pl.circuit(counting(), progress=stop, **asked)
    step = next(path for path in sorted((tmp_path / "run" / STEPS).glob("*.npz")) if "truth" in np.load(path).files)
    with np.load(step) as arrays:
        changed = {name: arrays[name] * 2 if name == "heads" else arrays[name] for name in arrays.files}
    np.savez(step, **changed)
    with raises(RunError, where=str(step), remedy="delete this file"):
        pl.circuit(counting(), **asked)
    step.unlink()
    pl.circuit(counting(), **asked)
    path = tmp_path / "run" / CIRCUIT_FILE
    path.write_text(path.read_text().replace('"reached": true', '"reached": false'))
    with raises(RunError, where=str(path)):
        Circuit.load(tmp_path / "run")


def test_an_interrupted_circuit_can_be_continued_with_other_nodes(tmp_path: Path) -> None:
    def stop(line: str) -> None:
        if "first k heads" in line:
            raise KeyboardInterrupt

    asked: dict[str, Any] = {"length": N, "prompts": 16, "out": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        pl.circuit(counting(), progress=stop, **asked)
    assert pl.circuit(counting(), nodes=6, **asked).writing.attribution.nodes == 6


def test_a_circuit_of_another_trace_is_not_shown_as_its_own(tmp_path: Path, planted: Circuit) -> None:
    pl.circuit(counting(), length=N, prompts=8, out=tmp_path / "run", nodes=1)
    with raises(RunError, where=CIRCUIT_FILE, what="another measurement", remedy="--fresh"):
        Circuit.load(tmp_path / "run", planted.trace)


def test_fresh_discards_steps(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"length": N, "prompts": 8, "out": tmp_path / "run", "nodes": 1}
    pl.circuit(counting(), **asked)
    steps = tmp_path / "run" / STEPS
    steps.mkdir()
    (steps / "0123456789abcdef.npz").write_bytes(b"old")
    (steps / "mine.txt").write_text("kept")
    pl.circuit(counting(), fresh=True, **asked)
    assert [path.name for path in steps.iterdir()] == ["mine.txt"]


# JSON


def test_the_json_has_the_contracted_keys(planted: Circuit) -> None:
    document = planted.as_dict()
    json.dumps(document, allow_nan=False)
    assert {"model", "inputs", "length", "prompts", "seed", "norm", "definitions", "origin", "warnings", "run"} <= set(
        document
    )
    (writer,) = document["writers"]
    assert {"layer", "head", "alone"} <= set(writer)
    assert set(writer["alone"]) == {"value", "low", "high", "n"}
    row = document["removed"][0]
    assert {"k", "value", "low", "high", "n", "random", "others", "difference", "even"} <= set(row)
    assert set(row["random"]) == {"value", "low", "high", "n"}
    assert {"sum", "truth", "overlap"} <= set(document["attribution"])
    assert {"depth", "variance_share", "leading", "dimensions"} <= set(document["carrier"][0])
    assert {"k", "earlier_removed", "random", "loss_change"} <= set(document["erasure"][0])
    assert document["readers"]
    assert document["edges"]


def test_the_carrier_of_a_planted_count_is_one_direction(planted: Circuit) -> None:
    assert planted.leading is not None
    depth, leading = planted.leading
    assert leading.value > 0.85
    assert planted.carrier is not None
    assert planted.carrier.dimensions[depth] == 1


# Refusals


def test_wrong_calls_are_refused_before_work(tmp_path: Path) -> None:
    subject = Subject.of(tiny("llama"), name="tiny")
    with raises(InputError, where="--rank", got="gradient", remedy="gradients"):
        pl.circuit(subject, rank="gradient")
    with raises(InputError, got="3", remedy="--prompts 4"):
        pl.circuit(subject, prompts=3)
    with raises(InputError, got="0", remedy="--nodes"):
        pl.circuit(subject, nodes=0)
    with raises(UnsupportedError, what="earlier layer", remedy="`posleak trace`"):
        pl.circuit(Subject.of(tiny("llama", num_hidden_layers=1), name="shallow"), length=N, prompts=8)
    learned = tiny("gpt2", n_embd=30, n_layer=3, n_head=3, n_inner=41, n_positions=2048)
    with raises(UnsupportedError, what="borrowed", remedy="`posleak measure`"):
        pl.circuit(Subject.of(learned, name="learned"), length=N, prompts=8, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_prompts_that_both_halves_share_are_a_warning() -> None:
    """Neither half alone has copies."""
    half = prepare(counting(), "random", length=N, seed=0).batch(range(8))
    with pytest.warns(PosleakWarning) as warned:
        found = pl.circuit(counting(), np.concatenate([half, half]))
    assert any("8 of 16 prompts differ" in warning for warning in found.warnings)
    assert any("8 of 16 prompts differ" in str(each.message) for each in warned)


def test_an_odd_number_of_prompts_is_a_warning() -> None:
    with pytest.warns(PosleakWarning, match="9 prompts"):
        assert pl.circuit(counting(), length=N, prompts=9).trace.ordinary.prompts == 4


def test_what_does_not_fit_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """LEACE of a wide model needs a square matrix at every depth."""
    fit_bytes = PositionEdit.fit_bytes
    monkeypatch.setattr(
        PositionEdit, "fit_bytes", lambda edit, *sizes: 2**60 if edit.method == "leace" else fit_bytes(edit, *sizes)
    )
    with pytest.warns(PosleakWarning, match="leace"):
        found = pl.circuit(counting(), length=N, prompts=16)
    assert found.carrier is not None
    assert {row.method for row in found.erasure} == {"erase", "random", "random-leace"}
    assert any("position=leace:1 is left out" in warning for warning in found.warnings)


def test_effects_without_controls_say_so() -> None:
    effect = SetEffect(estimate(0.5, 0.4, 0.6, 16))
    assert effect.as_row() == {
        "value": 0.5, "low": 0.4, "high": 0.6, "n": 16, "others": None, "random": None, "difference": None, "draws": (),
    }  # fmt: skip


# Claims


def test_claims_about_a_planted_circuit_are_decided_by_its_numbers(tmp_path: Path) -> None:
    found = pl.claims(counting(), paper="posleak", length=N, prompts=16, out=tmp_path / "run")
    results = {result.id: result for result in found.results}
    stored = Circuit.load(tmp_path / "run")
    assert stored is not None, "the page shows the circuit, too"
    chosen, row = stored.writing.of_size(1), stored.erased("erase", 1)
    assert chosen is not None
    assert row is not None
    few, erased = results["circuit.few-heads"], results["circuit.erasure"]
    assert (few.effect, few.details["heads"]) == (float(chosen.leading.removed.value), 1)
    assert few.verdict.value == "supported"
    assert few.details["even"] == chosen.even.removed
    assert results["circuit.random-heads"].verdict.value == "supported"
    assert results["circuit.one-direction"].verdict.value == "supported"
    assert erased.effect == row.earlier_removed.value


def test_claims_keep_the_circuit_of_the_folder(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"length": N, "out": tmp_path / "run"}
    circuit = pl.circuit(counting(), prompts=32, rank="intervene", **asked)
    before = (tmp_path / "run" / CIRCUIT_FILE).read_bytes()
    pl.claims(counting(), paper="posleak", prompts=16, **asked)
    assert (tmp_path / "run" / CIRCUIT_FILE).read_bytes() == before
    assert circuit.writing.attribution.method == "intervene"


def test_fresh_claims_keep_their_baseline(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"paper": "posleak", "length": N, "prompts": 16, "out": tmp_path / "run"}
    first = pl.claims(counting(), **asked)
    again = pl.claims(counting(), fresh=True, **asked)
    assert Run.load(tmp_path / "run").record.digest == again.run.record.digest == first.run.record.digest
    assert Circuit.load(tmp_path / "run") is not None


def test_without_other_heads_in_a_layer_there_is_no_random_control(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(PosleakWarning, match="3 writers have no random control"):
        found = pl.circuit(counting(writers=(0, 1, 2)), length=N, prompts=32)
    chosen, first = found.writing.chosen, found.writing.of_size(1)
    assert chosen is not None
    assert first is not None
    assert (chosen.k, chosen.leading.random) == (3, None)
    assert first.leading.random is not None, "two heads of layer 0 are left"
    monkeypatch.setattr("posleak.analyses.circuit.writing.random_sets", lambda *_: [])
    with pytest.warns(PosleakWarning, match="no random control"):
        tested = pl.claims(counting(), paper="posleak", length=N, prompts=16)
    results = {result.id: result for result in tested.results}
    assert results["circuit.few-heads"].verdict.value == "supported"
    assert "too few heads" in str(results["circuit.random-heads"].reason)


def test_claims_about_a_circuit_that_is_not_there_are_not_applicable() -> None:
    found = pl.claims(Subject.of(tiny("llama", scale=0.01), name="flat"), paper="posleak", length=N, prompts=16)
    verdicts = {result.id: result.verdict.value for result in found.results}
    assert verdicts["circuit.few-heads"] == verdicts["circuit.random-heads"] == "not applicable"
    table = np.random.default_rng(0).integers(3, 90, (16, N))
    with pytest.warns(PosleakWarning, match="given"):
        given = pl.claims(Subject.of(tiny("llama"), name="tiny"), table, paper="posleak")
    assert all("need different prompts" in str(result.reason) for result in given.results)
