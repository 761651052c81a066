"""All cells of a sweep as one table and one page: paired, pooled over seeds, each cell once, and true."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import posleak as pl
from posleak.errors import RunError
from posleak.leakage import Estimate, Jackknife
from posleak.reports.collected import CollectedPage
from posleak.runs.run import Run
from posleak.sweeps.collect import TABLE_FILE, collected, estimate_of
from posleak.sweeps.manifest import manifest
from posleak.sweeps.state import CELL_FILE, FINISHED
from posleak.sweeps.storage import CELLS_FOLDER, Storage
from posleak.sweeps.sweep import sweep
from support.errors import raises
from support.report_tiny import HOSTILE, browser, opened
from support.sweep_tiny import SMALL, Here, tiny_models

STEPS = (0, 16, 512)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A training with three checkpoints, whose name is a script; and a model under three edits and two lengths."""
    place = tmp_path_factory.mktemp("models")
    tiny_models(place / "training", *(f"checkpoint-{step}" for step in STEPS))
    (model,) = tiny_models(place, "mine")
    edits = {"models": [model], "edits": ["none", "window=9", "bos=zero"], "length": [48, 64]}
    series = {"checkpoints": str(place / "training"), "title": f"training {HOSTILE}"}
    return {**SMALL, "seed": [0, 1], "grids": [{"models": [series], "kind": "trace"}, edits]}


@pytest.fixture(scope="module")
def root(said: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("collected") / "sweep"
    assert sweep(said, out=place, engine=Here()).complete
    return place


@pytest.fixture(scope="module")
def table(root: Path) -> pd.DataFrame:
    found = pl.collect(root)
    assert isinstance(found, pd.DataFrame)
    return found


def whole(table: pd.DataFrame, norm: str = "attention", **wanted: Any) -> pd.DataFrame:
    found = table[table.layer.isna() & (table.queries == "all") & (table.norm == norm)]
    for name, value in wanted.items():
        found = found[found[name] == value]
    return found


def test_every_cell_is_there_once_with_its_own_numbers(said: dict[str, Any], root: Path, table: pd.DataFrame) -> None:
    cells = manifest(said).cells
    assert set(table["cell"]) == {cell.id[:12] for cell in cells}
    keys = ["cell", "layer", "queries", "norm", "quantity", "component"]
    assert not table.duplicated(keys).any()
    for cell in cells[::5]:
        run = Run.load(root / CELLS_FOLDER / cell.folder)
        row = whole(table, cell=cell.id[:12], quantity="power", component="total").iloc[0]
        assert row["value"] == run.summary.model["all"].power["total"].value
        assert (row["seed"], row["length"], row["n"]) == (cell.spec.seed, cell.spec.length, cell.spec.prompts)


def test_the_file_says_the_same(root: Path, table: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(pd.read_parquet(root / TABLE_FILE), table, check_dtype=False)


def test_the_queries_of_the_documentation_work(root: Path, table: pd.DataFrame) -> None:
    """Every block of docs/sweeps.md that reads collected.parquet."""
    text = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "collected.parquet" in block]
    assert len(blocks) >= 2
    assert any("duckdb" in block for block in blocks)
    for block in blocks:
        found: dict[str, Any] = {}
        exec(block.replace("runs/grid", str(root)), found)
        assert len(found["answer"]) > 0, block


def test_edits_are_paired_with_the_same_cell_without_them(
    said: dict[str, Any], root: Path, table: pd.DataFrame
) -> None:
    cells = [cell for cell in manifest(said).cells if cell.spec.length == 64 and cell.spec.seed == 1]
    by_edit = {cell.spec.edit_texts: Run.load(root / CELLS_FOLDER / cell.folder) for cell in cells}
    edited, unedited = by_edit["window=9",], by_edit[()]
    products = edited.weighted_by(unedited)["all"].averaged((0, 1)), unedited.products["all"].averaged((0, 1))
    for norm in ("attention", "even"):
        ratio = whole(table, norm, edits="window=9", length=64, seed=1, quantity="ratio", component="mask").iloc[0]
        after, before = (Jackknife(4).inner(each.norms[norm].own["mask"]) for each in products)
        expected = after.over(before).estimate
        assert tuple(ratio[["value", "low", "high"]]) == (expected.value, expected.low, expected.high)
    assert whole(table, edits="none", quantity="ratio").empty


def test_without_arrays_ratios_are_only_evenly_weighted(root: Path, table: pd.DataFrame, tmp_path: Path) -> None:
    """Of an edited cell and of a cell without edits, which has two edited ones."""
    place = tmp_path / "sweep"
    shutil.copytree(root, place)
    lost = {
        record.cell.details: record.cell.folder
        for record in collected(str(place)).finished
        if (record.cell.spec.edit_texts, record.cell.spec.length, record.cell.spec.seed)
        in ((("window=9",), 48, 0), ((), 64, 1))
    }
    assert len(lost) == 2
    for folder in lost.values():
        (place / CELLS_FOLDER / folder / "results.nc").unlink()
    found = collected(str(place))
    assert len(found.notes) == 3
    assert all("results.nc" in each.why for each in found.notes)
    columns = ["edits", "length", "seed", "component", "value", "low", "high"]
    now, before = (whole(each, "even", quantity="ratio")[columns] for each in (found.table, table))
    pd.testing.assert_frame_equal(now.reset_index(drop=True), before.reset_index(drop=True))
    left, all_of_them = (whole(each, quantity="ratio") for each in (found.table, table))
    assert left.cell.nunique() == all_of_them.cell.nunique() - 3
    assert "incomplete" in CollectedPage(found).html()
    assert len(found.as_dict()["notes"]) == 3


def test_seeds_are_pooled_and_nothing_else(root: Path) -> None:
    found = collected(str(root))
    pooled = found.pooled
    assert set(pooled["seeds"]) == {2}
    rows = whole(found.table, edits="bos=zero", length=48, quantity="power", component="mask")
    one, two = (estimate_of(row) for row in rows.to_dict("records"))
    mean = pooled[(pooled.edits == "bos=zero") & (pooled.length == 48) & (pooled.quantity == "power")]
    mean = mean[(mean.component == "mask") & (mean.queries == "all") & (mean.norm == "attention")].iloc[0]
    assert mean["value"] == pytest.approx((one.value + two.value) / 2)
    assert mean["n"] == 8
    width = np.hypot(one.high - one.value, two.high - two.value) / 2
    assert mean["high"] - mean["value"] == pytest.approx(float(width))


def test_pooled_intervals_cover_as_often_as_they_say() -> None:
    """Means of three seeds of a normal number, with intervals as one measurement has them."""
    from scipy.special import stdtrit

    draw, n, seeds, covered = np.random.default_rng(0), 8, 3, 0
    t = float(stdtrit(n - 1, 0.975))
    for _ in range(2000):
        x = draw.normal(size=(seeds, n))
        value, error = x.mean(1), t * x.std(1, ddof=1) / np.sqrt(n)
        parts = [
            Estimate(np.asarray(v), np.asarray(v - e), np.asarray(v + e), n) for v, e in zip(value, error, strict=True)
        ]
        mean = Estimate.average(parts)
        covered += bool(mean.low < 0 < mean.high)
    assert 0.94 < covered / 2000 < 0.99, "conservative, and not by much"


def test_what_was_measured_again_counts_once(root: Path, tmp_path: Path) -> None:
    """The same cell with other versions of the software has another id: the newer one is shown, the older one named."""
    from dataclasses import replace

    place = tmp_path / "sweep"
    shutil.copytree(root, place)
    folder = next(iter(sorted((place / CELLS_FOLDER).iterdir())))
    record = FINISHED.read(folder / CELL_FILE)
    older = place / CELLS_FOLDER / "older-000000000000"
    shutil.copytree(folder, older)
    FINISHED.write(older / CELL_FILE, replace(record, id="0" * 64, finished="2001-01-01T00:00:00+00:00"))
    found = collected(str(place))
    assert len(found.finished) == len(collected(str(root)).finished)
    assert [each.why for each in found.omitted] == [
        "it was measured again later, with other versions of posleak, torch or transformers"
    ]


@pytest.mark.parametrize("name", ["numbers.parquet", "products.npz", "cell.json"])
def test_a_damaged_cell_is_named_and_the_others_are_shown(root: Path, tmp_path: Path, name: str) -> None:
    place = tmp_path / "sweep"
    shutil.copytree(root, place)
    folder = next(iter(sorted((place / CELLS_FOLDER).iterdir())))
    (folder / name).write_bytes(b"x" + (folder / name).read_bytes()[1:])
    found = collected(str(place))
    assert len(found.finished) == len(list((place / CELLS_FOLDER).iterdir())) - 1
    assert [each.label for each in found.omitted] == [folder.name]


def test_a_place_without_a_sweep_is_refused(tmp_path: Path) -> None:
    with raises(RunError, where=tmp_path, expected="cells/", remedy="--out"):
        collected(str(tmp_path))


def test_failures_are_on_the_page(tmp_path: Path) -> None:
    (model,) = tiny_models(tmp_path, "mine")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    place = tmp_path / "sweep"
    sweep(
        {**SMALL, "models": [model, str(tmp_path / "broken")], "edits": ["none", "window=off"]},
        out=place,
        engine=Here(),
    )
    text = CollectedPage(collected(str(place))).html()
    assert "2 cells failed" in text
    assert "window=off" in text


# -- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if shutil.which("chromium") is None:
        pytest.skip("no chromium: `make test` installs it where it may")
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def seen(chromium: Any, root: Path, table: pd.DataFrame) -> Any:
    return opened(chromium, root / "collected.html")


def lines(page: Any) -> Any:
    return page.evaluate(
        "document.querySelector('#curves').data.map((t) => [t.name, Array.from(t.x), Array.from(t.y)])"
    )


@pytest.mark.page
def test_the_page_draws_curves_over_checkpoints(seen: Any, root: Path) -> None:
    assert seen.errors == []
    assert seen.requests == []
    ((name, x, y),) = lines(seen.page)
    assert [round(10**place - 1) for place in x] == list(STEPS)
    pooled = collected(str(root)).pooled
    wanted = pooled[(pooled.quantity == "power") & (pooled.component == "total") & (pooled.queries == "all")]
    wanted = wanted[wanted.step.notna()].sort_values("step")
    expected = {norm: wanted[wanted.norm == norm]["value"].tolist() for norm in ("attention", "even")}
    assert y == pytest.approx(expected["attention"])
    seen.page.select_option("#curve-norm", "even")
    assert lines(seen.page)[0][2] == pytest.approx(expected["even"]) != pytest.approx(expected["attention"])
    seen.page.select_option("#curve-norm", "attention")
    assert seen.page.evaluate("window.pwned") is None
    assert "pwned" not in name or "&lt;" in name


@pytest.mark.page
def test_another_number_and_another_knob_can_be_chosen(seen: Any, root: Path) -> None:
    page = seen.page
    page.select_option("#curve-quantity", "all/share/here")
    assert page.locator("#curve-caption").inner_text().startswith("share from the layer's own mask")
    page.select_option("#curve-quantity", "all/power/mask")
    page.select_option("#curve-x", "length")
    names = {name for name, _, _ in lines(page)}
    assert any("bos=zero" in name for name in names)
    page.select_option("#curve-only-edits", "1")
    assert len(lines(page)) == 1
    assert seen.errors == []


@pytest.mark.page
def test_the_map_has_every_pair_of_two_knobs(seen: Any, root: Path) -> None:
    page = seen.page
    assert page.locator("#map-y").input_value() == "edits"
    page.select_option("#map-quantity", "all/ratio/mask")
    z = page.evaluate("document.querySelector('#map').data[0].z")
    text = page.evaluate("document.querySelector('#map').data[0].text")
    edits = page.evaluate("document.querySelector('#map').layout.yaxis.ticktext")
    assert sorted(edits) == ["bos=zero", "none", "window=9"]
    pooled = collected(str(root)).pooled
    ratio = pooled[(pooled.quantity == "ratio") & (pooled.component == "mask") & (pooled.queries == "all")]
    ratio = ratio[ratio.norm == "attention"]
    for (edit, length), group in ratio.groupby(["edits", "length"]):
        row = edits.index(str(edit))
        assert z[row][[48, 64].index(int(str(length)))] == pytest.approx(group["value"].iloc[0]), (edit, length)
    assert text[edits.index("none")] == ["", ""], "without edits there is no ratio"
    assert json.dumps(z)
    assert seen.errors == []


@pytest.mark.page
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_narrow_and_wide_windows(chromium: Any, root: Path, table: pd.DataFrame, width: int) -> None:
    page = opened(chromium, root / "collected.html", width=width, scheme="dark").page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_the_table_on_the_page_needs_no_script(root: Path, table: pd.DataFrame) -> None:
    text = (root / "collected.html").read_text(encoding="utf-8")
    assert HOSTILE not in text
    assert text.count("<tr>") == 1 + 3 + 6
    assert Storage(str(root)).read("collected.html") == text.encode()
