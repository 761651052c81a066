"""Comparisons: cells of a sweep are paired, and its balance table says what the runs say."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import posleak as pl
from posleak.cli.sweep import balance_markdown, balance_tables
from posleak.errors import TooLargeError
from posleak.leakage import Jackknife
from posleak.models import load
from posleak.runs.run import Run
from posleak.sweeps.collect import BALANCE_FILE, BalanceTable, collected
from posleak.sweeps.state import State
from posleak.sweeps.sweep import Sweep, sweep
from posleak.typed import plain
from support.families import tiny
from support.sweep_tiny import Here

SMALL = {"length": 64, "prompts": 4, "resources": {"cpus": 1}}


@pytest.fixture(scope="module")
def grids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two tiny models of different shape, as folders; one under edits, of which one has no effect."""
    root = tmp_path_factory.mktemp("models")
    tiny("llama", num_hidden_layers=2).save_pretrained(root / "small")
    tiny("gemma3_text").save_pretrained(root / "mixed")
    edited = {"models": str(root / "small"), "edits": ["none", "window=9", "rope=ntk:1", "window=64"]}
    return {"name": "tiny", "question": "Does it work?", **SMALL, "grids": [edited, {"models": str(root / "mixed")}]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("balance")


@pytest.fixture(scope="module")
def swept(grids: dict[str, Any], root: Path) -> Sweep:
    return sweep(grids, out=root, engine=Here())


@pytest.fixture(scope="module")
def table(swept: Sweep) -> BalanceTable:
    return swept.balance


def test_removed_is_paired_with_the_first_cell_of_the_model(table: BalanceTable) -> None:
    base, window, unchanged, mixed = table.rows
    assert base.removed == {}
    assert mixed.removed == {}
    assert float(unchanged.removed["mask, all"].value) == pytest.approx(0, abs=1e-9)
    even = [row.balance.numbers["all"].norms["even"].power["mask"].value for row in (window, base)]
    assert float(window.removed["mask, all, even"].value) == pytest.approx(1 - even[0] / even[1])
    own = [row.balance.numbers["all"].power["mask"].value for row in (window, base)]
    edited, unedited = Run.load(window.run), Run.load(base.run)
    power = Jackknife(4).inner(edited.weighted_by(unedited)["all"].averaged((0, 1)).own["mask"]).value
    assert float(window.removed["mask, all"].value) == pytest.approx(1 - float(power) / own[1])
    assert float(window.removed["mask, all"].value) != pytest.approx(1 - own[0] / own[1])
    shares = base.balance.numbers["all"].share
    total = sum(float(shares[part].value) for part in ("mask", "drift", "sink"))
    assert total == pytest.approx(1.0) or np.isnan(total)


def test_cells_without_effect_are_left_out_with_a_reason(table: BalanceTable, swept: Sweep) -> None:
    assert [status.state for status in swept.cells].count(State.left_out) == 1
    assert swept.complete
    assert {label.rsplit(" ", 1)[1]: "hides nothing" in why for label, why in table.left_out.items()} == {
        "window=64": True
    }


def test_sliding_and_global_layers_have_slopes_of_their_own(table: BalanceTable) -> None:
    assert set(table.rows[-1].balance.slopes) == {"all", "sliding"}, "one global layer has no slope"


def test_a_comparison_keeps_its_table_and_prints_it_as_json(table: BalanceTable, swept: Sweep, root: Path) -> None:
    stored = json.loads((root / BALANCE_FILE).read_text())
    assert stored["question"] == "Does it work?"
    assert [row["label"] for row in stored["rows"]] == [row.cell.label for row in table.rows]
    assert swept.as_dict()["balance"] is table
    assert Run.load(table.rows[1].run).record.spec.edit_texts == ("window=9",)


def test_collect_has_the_same_table(table: BalanceTable, root: Path) -> None:
    again = {row.cell.label: row for row in collected(str(root)).balance.rows}
    for row in table.rows:
        other = again[row.cell.label]
        assert plain(other.balance) == plain(row.balance)
        assert plain(other.removed) == plain(row.removed)


def test_an_object_store_has_the_same_table(grids: dict[str, Any], table: BalanceTable) -> None:
    import fsspec

    rows = sweep({**grids, "grids": grids["grids"][:1]}, out="memory://balance", engine=Here()).balance.rows
    fsspec.filesystem("memory").rm("/balance", recursive=True)
    assert plain([row.removed for row in rows]) == plain([row.removed for row in table.rows[:3]])


def test_settings_with_other_sampled_positions_are_not_paired(tmp_path: Path) -> None:
    """The same prompts with another origin have other offsets, and no power in common."""
    tiny("llama", num_hidden_layers=2).save_pretrained(tmp_path / "small")
    grid = {**SMALL, "models": str(tmp_path / "small"), "origin": [4, 1]}
    rows = sweep(grid, out=tmp_path / "sweep", engine=Here()).balance.rows
    assert [row.removed for row in rows] == [{}, {}]
    assert [row.cell.label for row in rows] == ["small", "small · origin 1"]


def test_the_tables_say_what_even_weights_give_where_it_differs(table: BalanceTable) -> None:
    console = Console(width=200, file=io.StringIO())
    for item in balance_tables(table):
        console.print(item)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    differing = [row for row in table.rows if row.balance.numbers["all"].disagreement(("mask", "drift", "sink"))]
    assert text.count("evenly weighted: mask") == len(differing)


def test_the_markdown_table_has_a_line_for_early_and_for_all_queries_in_both_norms(table: BalanceTable) -> None:
    lines = balance_markdown(table).splitlines()
    assert len(lines) == 2 + 4 * len(table.rows)
    assert sum("| even |" in line for line in lines) == 2 * len(table.rows)
    assert len({line.count("|") for line in lines}) == 1


def test_models_in_memory_are_told_apart_by_their_weights(tmp_path: Path) -> None:
    """Two models of one name in one place: neither is taken for the other."""
    small: Any = {"length": 48, "prompts": 4, "out": tmp_path}
    first, second = (pl.Subject.of(tiny("llama", scale=scale), name="mine") for scale in (1.0, 2.0))
    one = pl.sweep("dtypes", models=first, **small)
    assert [row.cell.label for row in one.balance.rows] == ["mine", "mine · dtype=bfloat16", "mine · dtype=float16"]
    assert len(pl.sweep("dtypes", models=[second], **small).computed) == 3
    assert pl.sweep("dtypes", models=first, **small).computed == ()


def test_a_model_that_does_not_fit_is_loaded_in_bfloat16(
    grids: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Any]()

    def small_memory(name: str, *, dtype: str | None = None, **options: Any) -> Any:
        asked.append(dtype)
        if dtype is None:
            raise TooLargeError("too large")
        return load(name, dtype=dtype, **options)

    monkeypatch.setattr("posleak.models.load", small_memory)
    result = sweep({**SMALL, "models": grids["grids"][1]["models"]}, out=tmp_path, engine=Here())
    assert asked == [None, "bfloat16"]
    assert result.finished[0].model.dtype == "bfloat16"
    assert any("bfloat16" in note for note in result.finished[0].warnings)
    assert not sweep({**SMALL, "models": "mine", "dtype": "float32"}, out=tmp_path, engine=Here()).complete
