"""Measured models of the zoo: intervals over models, tables, verdicts; siblings of Llama; shipped models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers.masking_utils import and_masks, causal_mask_function
from typer.testing import CliRunner

import posleak as pl
import posleak.cli
from posleak.analyses.claims.catalogue import Verdict
from posleak.edits.context import borrowed, keeps_first, require_shift_invariant
from posleak.errors import PosleakWarning, RunError, UnsupportedError
from posleak.inputs.prompts import DONOR_MARGIN
from posleak.leakage import Estimate
from posleak.models import Subject, builtin, load
from posleak.models.identity import SIBLING_MODEL_TYPE
from posleak.probe.visibility import Visibility, read_mask
from support.documented import FREE, ROOT, documented, produced
from support.errors import raises
from support.families import tiny
from tools import ship, zoo_docs
from tools.markdown import read_part
from zoo import jobs, recipe, table
from zoo.__main__ import app
from zoo.layout import Layout
from zoo.measuring import QUANTITIES, UNSEEN, measure_models, read_measured
from zoo.recipe import RECIPES
from zoo.table import TrainingCurve, VariantComparison, ZooTable, zoo_table
from zoo.terminal import zoo_tables
from zoo.tokens import tokens_for
from zoo.training import held_out_loss, read_training, train
from zoo.variants import VARIANTS
from zoo.verdicts import ARCHITECTURE_CLAIMS, verdicts

SMALL = replace(RECIPES["backcopy"], width=16, heads=2, feedforward=24, layers=3, context=96, batch=2, steps=20)
SOME = ("rope", "window-first", "learned")

# Intervals over models


def test_a_layout_by_hand() -> None:
    """Residuals are ±0.5: σ² = 4 · 0.25 / 1; Student's t of 1 degree of freedom is 12.706."""
    layout = Layout(np.array([[1.0, 2.0], [3.0, 6.0]]))
    differences = layout.differences
    assert (layout.sigma, layout.freedom) == (1.0, 1)
    assert differences.value.tolist() == [0.0, 3.0]
    assert math.isclose(differences.high[1] - 3.0, 12.7062 * math.sqrt(2 / 2), rel_tol=1e-4)
    assert np.isnan([differences.low[0], differences.high[0]]).all(), "the baseline is compared with itself"
    assert math.isclose(layout.means.high[0] - 1.5, 12.7062 * math.sqrt(1 / 2), rel_tol=1e-4)


def test_without_residual_variance_there_is_no_interval() -> None:
    """One seed, or residuals that are all zero: there is never an interval of width zero."""
    for values in ([[1.0], [2.0]], [[1.0, 2.0], [4.0, 5.0]], [[0.0, 0.0], [0.0, 0.0]], [[0.1, 0.3], [0.2, 0.4]]):
        layout = Layout(np.array(values))
        assert np.isnan(layout.differences.low).all()
        assert np.isnan(layout.means.high).all()


def test_a_layout_refuses_gaps() -> None:
    with pytest.raises(ValueError, match="each variant and seed"):
        Layout(np.array([[1.0, np.nan], [2.0, 3.0]]))


@pytest.mark.parametrize("seeds", [2, 3])
def test_intervals_over_models_cover(seeds: int) -> None:
    """Ten variants, and seeds that differ much: true differences are in their intervals in about 95 of 100 simulated
    zoos, and so are true means of these seeds."""
    random = np.random.default_rng(0)
    truth = np.arange(10.0)
    inside = {"differences": 0.0, "means": 0.0}
    for _ in range(2000):
        blocks = random.normal(0, 2.0, seeds)
        layout = Layout(truth[:, None] + blocks + random.normal(0, 0.7, (10, seeds)))
        for name, true in (("differences", truth), ("means", truth + blocks.mean())):
            estimate = getattr(layout, name)
            inside[name] += ((estimate.low <= true) & (true <= estimate.high))[1:].mean()
    assert all(0.93 < count / 2000 < 0.97 for count in inside.values()), inside


# The table


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three variants and two seeds, trained for a moment and measured."""
    root = tmp_path_factory.mktemp("zoo")
    for name in SOME:
        for seed in (0, 1):
            folder = root / "backcopy" / f"{name}-{seed}"
            record = train(VARIANTS[name], SMALL, seed, tokens_for(SMALL), folder, threads=1)
            measure_models(folder, record, prompts=4)
    return root


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the recipe of the small models the recipe for backcopy."""
    for module in (recipe, jobs):
        monkeypatch.setitem(module.RECIPES, "backcopy", SMALL)


@pytest.mark.usefixtures("small")
def test_models_are_measured_once_on_both_kinds_of_input_and_at_every_checkpoint(zoo: Path) -> None:
    folder = zoo / "backcopy" / "rope-1"
    measured = read_measured(folder)
    assert {(each.step, each.inputs) for each in measured.found} == {
        (20, "backcopy"), (20, "random"), (0, "backcopy"), (16, "backcopy"),
    }  # fmt: skip
    assert all(set(each.numbers) == set(QUANTITIES) for each in measured.found)
    status_lines: list[str] = []
    record = read_training(folder)
    assert record is not None
    measure_models(folder, record, prompts=4, progress=status_lines.append)
    assert status_lines == []
    own = pl.trace(load(folder), "backcopy", length=32, prompts=4, seed=UNSEEN + 1)
    stored = measured.of(20, "backcopy", 4)
    assert stored is not None
    assert float(stored.numbers["here"].value) == float(own.model["all"].share["here"].value)
    assert float(stored.numbers["total"].low) == float(own.ordinary.summary.model["all"].power["total"].low)


@pytest.mark.usefixtures("small")
def test_the_table_compares_variants_that_have_the_number(zoo: Path) -> None:
    results = zoo_table(zoo, "backcopy", prompts=4)
    total, here = results.comparison("total"), results.comparison("here")
    assert total is not None
    assert here is not None
    assert total.variants == SOME
    assert here.variants == ("rope", "window-first"), "a borrowed context is not defined for learned positions"
    assert total.is_ratio
    values = np.array([[float(each.value) for each in row] for row in total.models])
    ratio = total.effect("learned")
    assert ratio is not None
    assert math.isclose(float(ratio.value), float(np.exp(np.log(values[2]).mean() - np.log(values[0]).mean())))
    assert ratio.n == 6
    mean = total.mean("learned")
    assert mean is not None
    assert math.isclose(float(mean.value), float(np.exp(np.log(values[2]).mean()))), "a geometric mean"
    assert here.left_out == {"learned": "not defined for this variant"}
    assert [curve.steps for curve in results.curves if curve.quantity == "total"] == [(0, 16, 20)] * 3
    with_gap = TrainingCurve("rope", "here", (0, 16), (0, 1), ((1.0, float("nan")), (1.0, 1.0)))
    path = table.write_table(zoo, replace(results, curves=(*results.curves, with_gap)))
    again = table.ZOO.read(path)
    assert again.trainings == results.trainings
    assert math.isnan(again.curves[-1].values[0][1])
    assert [each.verdict for each in verdicts(again)] == [each.verdict for each in verdicts(results)]


@pytest.mark.usefixtures("small")
def test_a_group_of_numbers_that_cannot_be_compared_says_so_instead_of_an_empty_table(zoo: Path) -> None:
    results = zoo_table(zoo, "backcopy", prompts=4)
    why = "rope: not positive in every model"
    bare = replace(results, comparisons=results.comparisons[:1], incomparable={"attention": why, "readers": why})
    reasons = bare.why_not(("attention", "readers", "pull"))
    assert reasons == f"not compared: attention to 0, sinks ({why}); pull (not measured)"
    console = Console(width=200, record=True, file=StringIO())
    for item in zoo_tables(bare):
        console.print(item)
    assert f"position 0, {reasons}" in console.export_text()
    assert f"Position 0, on backcopy, {reasons}." in zoo_docs.balance(bare)


@pytest.mark.usefixtures("small")
def test_the_commands_list_and_measure(zoo: Path) -> None:
    run = CliRunner()
    listed = run.invoke(app, ["list", "--out", str(zoo)])
    assert listed.exit_code == 0
    assert "NoPE" in listed.output
    assert json.loads(run.invoke(app, ["list", "--out", str(zoo), "--json"]).stdout)["trainings"][0]["seed"] == 0
    shown = run.invoke(app, ["measure", "--data", "backcopy", "--prompts", "4", "--out", str(zoo)])
    assert shown.exit_code == 0, shown.output
    assert "window-first" in shown.output
    assert "matched models" in shown.output
    printed = run.invoke(app, ["measure", "--data", "backcopy", "--prompts", "4", "--out", str(zoo), "--json"])
    parsed = json.loads(printed.stdout)
    assert len(parsed["tables"][0]["verdicts"]) == len(ARCHITECTURE_CLAIMS)
    assert set(parsed["quantities"]) == set(QUANTITIES)
    keys = {key.replace("trainings[]", "trainings") for key in produced(parsed, FREE["zoo measure"])}
    assert keys == documented("zoo measure")


def test_a_zoo_with_nothing_to_compare_says_what_to_do(zoo: Path, tmp_path: Path) -> None:
    with raises(RunError, got="no training", remedy="python -m zoo train rope window --data text"):
        zoo_table(tmp_path, "text")
    with raises(RunError, got="all steps", remedy="python -m zoo train rope window --data backcopy"):
        zoo_table(zoo, "backcopy")  # these models have another recipe


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ((1.0, -0.1), "no ratio"),
        ((1.0, math.nan), "zero"),
        ((1.0,), "every seed"),
        ((), "not defined"),
    ],
)
def test_a_variant_that_cannot_be_compared_is_left_out_with_the_reason(values: tuple[float, ...], why: str) -> None:
    none = np.asarray(np.nan)
    own = {seed: Estimate(np.asarray(value), none, none, 4) for seed, value in enumerate(values)}
    obstacle = table._obstacle(QUANTITIES["residual"], own, (0, 1))
    assert obstacle is not None
    assert why in obstacle


def test_values_that_are_zero_by_construction_are_left_out() -> None:
    """A window hides position 0 from late queries; such zeros would make all intervals narrower."""
    none = np.asarray(np.nan)
    zero = {seed: Estimate(np.asarray(0.0), none, none, 4) for seed in (0, 1)}
    assert table._obstacle(QUANTITIES["attention"], zero, (0, 1)) == "0 by construction"
    assert table._obstacle(QUANTITIES["readers"], zero, (0, 1)) is None


def test_training_from_the_command_line(tmp_path: Path) -> None:
    command = ["train", "rope", "--data", "backcopy", "--steps", "3", "--out", str(tmp_path)]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    assert "held-out loss" in first.output
    assert (tmp_path / "backcopy" / "rope-0-3" / "config.json").is_file()
    again = CliRunner().invoke(app, [*command, "--json"])
    assert json.loads(again.stdout)["trainings"][0]["finished"]
    for wrong in ([], ["rope", "--all"], ["rope", "--data", "backcopy", "--text", str(ROOT / "README.md")]):
        assert CliRunner().invoke(app, ["train", *wrong]).exit_code == 2


# Verdicts


def planted(quantity: str, rope: list[float], other: list[float], variant: str) -> ZooTable:
    """Return a table of ten variants, one of which differs."""
    names = tuple(VARIANTS)
    values = np.array([other if name == variant else rope for name in names])
    values = values + np.random.default_rng(1).normal(0, 0.01, values.shape)
    own = tuple(
        tuple(Estimate(np.asarray(x), np.asarray(np.nan), np.asarray(np.nan), 16) for x in row) for row in values
    )
    ratio = QUANTITIES[quantity].is_power
    effects = Layout(np.log(values) if ratio else values).differences
    if ratio:
        effects = Estimate(np.exp(effects.value), np.exp(effects.low), np.exp(effects.high), effects.n)
    comparison = VariantComparison(
        quantity, "backcopy", names, {}, (0, 1), own, Layout(values).means, effects, 9, ratio
    )
    return ZooTable("backcopy", (), (comparison,), (), {})


@pytest.mark.parametrize(
    ("sentence", "rope", "other", "verdict"),
    [
        ("zoo.ntk", 1.0, 0.5, Verdict.SUPPORTED),
        ("zoo.ntk", 1.0, 1.5, Verdict.CONTRADICTED),
        ("zoo.ntk", 1.0, 1.0, Verdict.INCONCLUSIVE),
        ("zoo.window", 0.1, 0.9, Verdict.SUPPORTED),
        ("zoo.bos-sink", 0.4, 0.1, Verdict.SUPPORTED),
    ],
)
def test_a_planted_effect_gets_its_verdict(sentence: str, rope: float, other: float, verdict: Verdict) -> None:
    chosen = next(each for each in ARCHITECTURE_CLAIMS if each.id == sentence)
    results = planted(chosen.quantity, [rope, rope + 0.1], [other, other + 0.1], chosen.variant)
    judged = {each.claim.id: each for each in verdicts(results)}
    assert judged[sentence].verdict is verdict
    others = [each for each in ARCHITECTURE_CLAIMS if each.quantity != chosen.quantity]
    assert all(judged[each.id].verdict is Verdict.NOT_APPLICABLE for each in others)


# Siblings of Llama


def sibling(**changes: Any) -> Subject:
    from posleak.models import siblings  # noqa: F401  registers them with transformers

    return Subject.of(tiny(SIBLING_MODEL_TYPE, **changes))


def test_a_kept_window_shows_position_0_and_as_many_keys_as_a_window() -> None:
    subject = sibling(kept_window=13)
    run = pl.measure(subject, length=64, prompts=4)
    assert run.record.calibration.windows == (13, 13, 13)
    assert subject.identity.spans == [13]
    model, ids = subject.model, torch.arange(40)[None]
    with torch.no_grad():
        fused = model(ids).logits
        model.set_attn_implementation("eager")
        assert torch.allclose(model(ids).logits, fused, atol=1e-4)


@pytest.mark.parametrize(("N", "W"), [(40, 12), (12, 12)])
def test_after_a_donor_every_query_of_a_kept_window_sees_equally_many_keys(N: int, W: int) -> None:
    """A query sees its own keys as without a donor, position 0, and keys of the donor up to the window size."""
    from posleak.models.siblings import nearest_and_first

    start, rule = N + DONOR_MARGIN, and_masks(nearest_and_first(W), causal_mask_function)
    whole = Visibility((1, 1, start + N, start + N), rule)
    require_shift_invariant(whole, N, start)
    assert keeps_first(whole)
    assert not keeps_first(Visibility((1, 1, start + N, start + N), causal_mask_function))
    lent = Visibility((1, 1, start + N, start + N), borrowed(rule, N, start, keeps_origin=True))
    rows = lent.rows(torch.arange(start, start + N))[0, 0]
    assert rows[1:].sum(1).tolist() == [W] * (N - 1)
    assert rows[0].nonzero().ravel().tolist() == [start]
    own = Visibility((1, 1, N, N), rule).rows(torch.arange(N))[0, 0]
    assert torch.equal(rows[:, start:], own)
    assert not rows[:, 0].any(), "the donor's first token is not the prompt's"
    dense = read_mask(whole.dense())
    assert dense is not None
    again = Visibility(
        (1, 1, start + N, start + N), borrowed(dense[0].rule, N, start, keeps_origin=True), dense[0].padding
    )
    assert torch.equal(again.rows(torch.arange(start, start + N))[0, 0], rows), "a dense mask of the model"
    donor = lent.rows(torch.arange(start))[0, 0]
    assert torch.equal(donor, whole.rows(torch.arange(start))[0, 0])


def test_one_token_repeated_tells_nothing_to_later_layers_but_position_0_is_at_its_distance() -> None:
    """Law L2 where position 0 is always in sight: states are equal, so that earlier masks tell nothing. But the offset
    to position 0 is the position itself, and rotation shows it, with equally many keys, too: that is the origin."""
    subject = sibling(kept_window=13)
    subject.model.double()
    with pytest.warns(PosleakWarning, match="the same"):
        trace = pl.trace(Subject.of(subject.model), "constant", length=64, prompts=4, bos="none")
    powers = {name: trace.layers["all"].power[name].value for name in ("earlier", "origin")}
    assert np.abs(powers["earlier"]).max() < 1e-9
    assert powers["origin"].min() > 0.1


def test_learned_positions_are_seen_as_a_table() -> None:
    subject = sibling(learned_positions=True)
    with pytest.warns(PosleakWarning, match="origin"):
        run = pl.measure(subject, length=64, prompts=4)
    assert run.record.positions.text == "table of positions"
    with raises(UnsupportedError, what="borrowed", remedy="`posleak measure`"):
        pl.trace(subject, length=64, prompts=4)


# Shipped models


@pytest.mark.parametrize("name", builtin.shipped_names())
def test_a_shipped_model_loads_by_its_name_with_its_record(name: str) -> None:
    subject = load(name)
    record = read_training(builtin.shipped_folder(name))
    assert record is not None
    assert record.finished
    assert subject.identity.source == builtin.SHIPPED_SOURCE
    assert name == f"zoo-{record.data.data}-{record.variant}"
    assert record.final_loss < record.data.unigram_nats / 1.8, "well below the unigram entropy"
    if record.data.data == "backcopy":  # its data is the same on every machine
        ids = tokens_for(record.recipe).held_out(record.recipe.context)
        if VARIANTS[record.variant].bos:
            ids[:, 0] = record.recipe.bos
        assert math.isclose(held_out_loss(subject.model, torch.from_numpy(ids)), record.final_loss, rel_tol=1e-3)


def test_shipped_models_are_small() -> None:
    sizes = [path.stat().st_size for path in builtin.SHIPPED_ROOT.rglob("*") if path.is_file()]
    assert 0 < sum(sizes) < 20_000_000


def test_what_a_shipped_text_model_shows() -> None:
    """Leakage is significantly above 0, and no head attends much to position 0."""
    run = pl.measure("zoo-text-rope", "text:stdlib", length=192, prompts=16)
    assert run.summary.model["all"].power["total"].low > 0
    assert to_position_0(run) < 0.1


def test_what_shipped_models_of_the_task_show() -> None:
    """Without positions, masks of earlier layers make the leakage; learned positions leak through the residual, and one
    head rests on position 0; standard RoPE has no sink there: one of its heads rests on triggers."""
    options: dict[str, Any] = {"length": 64, "prompts": 32}
    nope = pl.trace("zoo-backcopy-nope", "backcopy", **options)
    assert nope.ordinary.summary.model["all"].power["total"].low > 0
    assert nope.model["all"].share["earlier"].low > 0.5
    with pytest.warns(PosleakWarning, match="origin"):
        learned = pl.measure("zoo-backcopy-learned", "backcopy", **options)
    assert learned.summary.model["all"].share["residual"].low > 0.8
    assert to_position_0(learned) > 0.3
    assert to_position_0(pl.measure("zoo-backcopy-rope", "backcopy", **options)) < 0.1


def to_position_0(run: pl.Run) -> float:
    """Return the largest mean attention of a head to position 0."""
    return float(np.nanmean(run.data["profile"].values[..., 0], axis=0).max())


# Documentation


def test_the_zoos_page_is_what_its_records_say() -> None:
    tables = [table.ZOO.read(ROOT / "docs" / "zoo" / f"{data}.json") for data in RECIPES]
    page = (ROOT / "docs" / "zoo.md").read_text(encoding="utf-8")
    for name, text in zoo_docs.parts(tables).items():
        assert read_part(page, name) == text, "run `python -m tools.zoo_docs docs/zoo.md`"
    for one in tables:
        assert {each.variant for each in one.trainings} == set(VARIANTS)
        assert all(len([x for x in one.trainings if x.variant == name]) == 2 for name in VARIANTS)
        assert len(zoo_docs.picture(one).axes) == 9


def test_models_are_shipped_only_if_all_are_trained(zoo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(builtin, "SHIPPED_ROOT", tmp_path / "shipped")
    monkeypatch.setattr(ship, "SHIPPED", {"backcopy": ("rope", "nope")})
    with raises(RunError, where="nope-0", remedy="python -m zoo train"):
        ship.ship(zoo)
    assert not (tmp_path / "shipped").exists()
    monkeypatch.setattr(ship, "SHIPPED", {"backcopy": ("rope", "learned")})
    assert ship.ship(zoo) == sum(path.stat().st_size for path in (tmp_path / "shipped").rglob("*") if path.is_file())
    assert read_training(tmp_path / "shipped" / "zoo-backcopy-learned") is not None
