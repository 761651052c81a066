"""Comparison of runs by layer and by head: values, paired intervals, and what is refused."""

from __future__ import annotations

import io
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import posleak as pl
from posleak.analyses.trace.trace import SOURCES, Trace
from posleak.axes import PARTS
from posleak.cli.commands import app
from posleak.errors import InputError, RunError
from posleak.leakage import Estimate, component
from posleak.leakage.power import prompt_pairs
from posleak.leakage.sampled import Sampled
from posleak.reports import compare as module
from posleak.reports.compare import CONTRIBUTIONS, Comparison, ComparisonRow
from posleak.reports.comparison_text import FORMATS, as_table
from posleak.runs.run import Run
from posleak.show.lines import PlainConsole
from support.errors import raises
from support.report_tiny import measured, traced

LAYERS, HEADS, PROMPTS = 3, 3, 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    return {
        "plain": measured(place / "plain"),
        "edited": measured(place / "edited", edits=("rope=ntk:4",)),
        "deep": measured(place / "deep", layers=2, heads=5),
        "other": measured(place / "other", "gemma3_text", layers=3, heads=3),
        "traced": traced(place / "traced"),
    }


def row(compared: Comparison, run: int, queries: str, at: tuple[int, ...], *, minus: bool = False) -> ComparisonRow:
    key = run, queries, at, minus
    (only,) = [r for r in compared.rows if (r.run, r.queries, r.at, r.minus is not None) == key]
    return only


def values(compared: Comparison, name: str, *, run: int, minus: bool = False) -> np.ndarray:
    """Return one quantity of all layers or heads, of all queries."""
    rows = [r for r in compared.rows if r.run == run and r.queries == "all" and (r.minus is not None) == minus]
    return np.array([float(r.cells[name].value) for r in rows])


@pytest.mark.parametrize("by", ["layer", "head"])
@pytest.mark.parametrize("minus", [False, True])
def test_means_over_layers_and_heads_are_the_quantities_of_the_model(
    folders: dict[str, Path], by: str, minus: bool
) -> None:
    """Powers and contributions are linear in the products of prompts; a share of the model is their ratio."""
    runs = [folders["plain"], folders["edited"]]
    model, fine = pl.compare(runs), pl.compare(runs, by=by)
    whole = row(model, 1, "all", (), minus=minus).cells
    for name in ("total", "residual", "sink_attention"):
        np.testing.assert_allclose(values(fine, name, run=1, minus=minus).mean(), whole[name].value, rtol=1e-9)
    for k, part in product(range(2), PARTS):
        cells = row(model, k, "all", ()).cells
        contribution = values(fine, CONTRIBUTIONS[part], run=k).mean()
        np.testing.assert_allclose(contribution, cells[part].value * cells["total"].value, rtol=1e-9)


@pytest.mark.parametrize("by", ["layer", "head"])
def test_contributions_add_up_to_the_total_and_their_differences_to_its_difference(
    folders: dict[str, Path], by: str
) -> None:
    fine = pl.compare([folders["traced"], folders["traced"], folders["plain"]], by=by)
    for each in fine.rows:
        for names in (PARTS, SOURCES[1:]):
            cells = [each.cells.get(CONTRIBUTIONS[name]) for name in names]
            assert (None in cells) == (names != PARTS and each.run == 2)
            if None not in cells:
                whole = sum(float(cell.value) for cell in cells if cell is not None)
                expected = float(each.cells["total"].value)
                assert whole == pytest.approx(expected, rel=1e-5, abs=1e-6), "`state`, which is left out, is rounding"


def test_a_trace_is_compared_by_source_in_each_layer_and_head(folders: dict[str, Path]) -> None:
    trace = Trace.load(folders["traced"])
    assert trace is not None
    for by, own in (("layer", trace.layers), ("head", trace.heads)):
        fine = pl.compare([folders["traced"], folders["plain"]], by=by)
        for queries, name in product(("all", "early"), SOURCES[1:]):
            numbers = own[queries]
            for each in (r for r in fine.rows if (r.run, r.queries, r.minus) == (0, queries, None)):
                share, total = numbers.share[name][each.at], numbers.power["total"][each.at]
                for end in ("value", "low", "high"):
                    np.testing.assert_allclose(getattr(each.cells[name], end), getattr(share, end))
                if np.isfinite(share.value):
                    np.testing.assert_allclose(each.cells[CONTRIBUTIONS[name]].value, share.value * total.value)
        assert not set(SOURCES) & set(row(fine, 1, "all", (0, 0)[: len(each.at)]).cells)


@pytest.mark.parametrize("by", ["layer", "head"])
def test_a_run_does_not_differ_from_itself_in_any_place(folders: dict[str, Path], by: str) -> None:
    compared = pl.compare([folders["traced"], folders["traced"]], by=by)
    differences = [each for each in compared.rows if each.minus is not None]
    assert len(differences) == 2 * LAYERS * (HEADS if by == "head" else 1)
    for each in differences:
        assert each.paired
        for kind in (each.cells, each.simultaneous):
            exact = {name: cell for name, cell in kind.items() if not np.isnan(cell.value)}
            assert {"total", *(CONTRIBUTIONS[name] for name in (*PARTS, *SOURCES[1:]))} <= set(exact)
            assert all(cell.value == cell.low == cell.high == 0 for cell in exact.values())


def naive_power(run: Run, weights: Run, prompts: list[int], layer: int, head: int) -> float:
    """Return the power of the total of one head, prompt pair by prompt pair."""
    x = component(run.data, "total").values[:, layer, head]  # [B, Q, D]
    w = weights.data["weight"].values[:, layer, head].mean(0)  # [D]
    queries = np.isfinite(x[0]).any(-1).sum()
    pairs = [float(np.nansum(w * x[b] * x[c])) for b in prompts for c in prompts if b != c]
    return float(np.mean(pairs) / queries)


@pytest.mark.parametrize("at", [(0, 0), (2, 1)])
def test_the_paired_difference_of_a_head_agrees_with_a_naive_computation(
    folders: dict[str, Path], at: tuple[int, int]
) -> None:
    runs = [Run.load(folders[name]) for name in ("plain", "edited")]
    prompts = list(range(PROMPTS))

    def difference(without: tuple[int, ...] = ()) -> float:
        left = [b for b in prompts if b not in without]
        return naive_power(runs[1], runs[0], left, *at) - naive_power(runs[0], runs[0], left, *at)

    pairs = zip(*(index.tolist() for index in prompt_pairs(PROMPTS)), strict=True)
    samples = np.array([difference(left) for left in (*((b,) for b in prompts), *pairs)])
    expected = Sampled(np.array(difference()), samples, PROMPTS)
    each = row(pl.compare(runs, by="head"), 1, "all", at, minus=True)
    found = each.cells["total"]
    np.testing.assert_allclose([found.value, found.low, found.high], [expected.value, *expected.interval], rtol=1e-8)
    joint = each.simultaneous["total"]
    wide = expected.at(1 - 0.05 / (LAYERS * HEADS)).interval
    np.testing.assert_allclose([joint.value, joint.low, joint.high], [expected.value, *wide], rtol=1e-8)
    assert joint.low < found.low <= found.value <= found.high < joint.high


def test_heads_that_do_not_exist_have_no_row(folders: dict[str, Path]) -> None:
    run = Run.load(folders["plain"])
    data = run.data.copy(deep=True)
    for array in data.data_vars.values():
        if "head" in array.dims:
            array.values[:, 1, 2] = np.nan  # as in a layer with two heads beside layers with three
    narrow = Run(run.record, data)
    compared = pl.compare([narrow, narrow], by="head")
    assert len(compared.rows) == 2 * 3 * (LAYERS * HEADS - 1)
    assert (1, 2) not in {each.at for each in compared.rows}
    assert all(np.isfinite(each.cells["total"].value) for each in compared.rows)


def test_layers_of_different_architectures_are_not_compared(folders: dict[str, Path]) -> None:
    for name in ("deep", "other"):
        with raises(RunError, what="layer", got=("tiny-llama", "2 layers of 5" * (name == "deep"), "omit --by")):
            pl.compare([folders["plain"], folders[name]], by="layer")
    compared = pl.compare([folders["plain"], folders["deep"], folders["edited"]], by="head")
    assert len(compared.labels) == 2
    assert "omit --by" in compared.refused[0].reason
    with raises(InputError, where="by", got="heads", expected=("model", "layer", "head")):
        pl.compare([folders["plain"], folders["edited"]], by="heads")


def test_json_of_heads_has_every_head_and_what_the_model_has(folders: dict[str, Path]) -> None:
    runs = [str(folders["traced"]), str(folders["edited"])]
    model, head = (
        json.loads(CliRunner().invoke(app, ["compare", *runs, "--json", "--by", by]).stdout) for by in ("model", "head")
    )
    assert (model["by"], head["by"]) == ("model", "head")
    assert set(model) == set(head)
    assert set(model["units"]) < set(head["units"])
    assert len(head["rows"]) == LAYERS * HEADS * len(model["rows"])
    for own, rows in ((model["rows"][0], head["rows"][:9]), (model["rows"][2], head["rows"][18:27])):
        for k, each in enumerate(rows):
            assert (each["layer"], each["call"], each["head"]) == (k // 3, k // 3, k % 3)
            assert set(own) < set(each)
            assert ("simultaneous" in each) == (each["minus"] is not None)
    (layer, *_) = json.loads(CliRunner().invoke(app, ["compare", *runs, "--json", "--by", "layer"]).stdout)["rows"]
    assert "head" not in layer
    assert not {"layer", "call", "head", "simultaneous"} & set(model["rows"][0])


def text(compared: Comparison, width: int = 160) -> str:
    stream = io.StringIO()
    PlainConsole(file=stream, width=width).print(as_table(compared))
    return stream.getvalue()


def test_a_table_of_many_heads_shows_the_largest_differences_and_says_so(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHOWN_HEADS", 4)
    compared = pl.compare([folders["plain"], folders["edited"]], by="head")
    largest = sorted((r for r in compared.rows if r.minus is not None and r.queries == "all"),
                     key=lambda r: -abs(float(r.cells["total"].value)))[:4]  # fmt: skip
    assert compared.shown == largest
    table = text(compared)
    lines = [line.split() for line in table.splitlines()]
    assert [line[0] for line in lines if line and line[0].count(".") == 1 and line[0][0].isdigit()] == [
        compared.place(each) for each in largest
    ]
    said = " ".join(table.split())
    assert "tables show the 4 heads with the largest differences" in said
    assert "the other 5 (--json has all)" in said
    assert "0.5 are expected by chance" in said
    for form in ("markdown", "latex"):
        made = FORMATS[form](compared)
        assert all(f" {compared.place(each)} " in made for each in largest)
        assert made.count("(paired)") >= 4
    by_layer = text(pl.compare([folders["plain"], folders["edited"]], by="layer"))
    assert "tables show" not in by_layer


@pytest.mark.parametrize(("low", "joint_low", "stars"), [(-0.1, -0.5, 0), (0.1, -0.5, 1), (0.2, 0.1, 2)])
def test_stars_mark_intervals_without_zero(low: float, joint_low: float, stars: int) -> None:
    one, two = np.array(1.0), np.array(2.0)
    cells, joint = ({"total": Estimate(one, np.array(end), two, 8)} for end in (low, joint_low))
    assert ComparisonRow(1, "all", cells, 0, True, (0,), joint).texts("total")[0] == "+1" + stars * "*"
