"""Layers have the numbers that the model gives them, everywhere: in a hybrid with attention in layers 1 and 3, too."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

import posleak as pl
from posleak.analyses.origin.origin import origin
from posleak.axes import layer_coordinates, layer_names
from posleak.models import Subject
from posleak.reports.gather import gather
from posleak.reports.tables import tables
from posleak.reports.terminal.run import run_tables, trace_layers
from posleak.runs.run import Run
from support.families import subject
from tools.shrink import tiny_model

SPEC: dict[str, Any] = {"length": 48, "prompts": 4}


@pytest.fixture(scope="module")
def hybrid() -> Subject:
    return Subject.of(tiny_model("zamba"), name="hybrid")


@pytest.fixture(scope="module")
def folder(hybrid: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "hybrid"
    pl.measure(hybrid, **SPEC, out=place)
    return place


def test_several_calls_of_one_layer_are_told_apart() -> None:
    assert layer_names((0, 1, 2)) == ("0", "1", "2")
    assert layer_names((1, 3)) == ("1", "3")
    assert layer_names((0, 0, 1, 1, 1)) == ("0a", "0b", "1a", "1b", "1c")
    assert layer_coordinates((0, 0, 1, 3)) == (0, 0.5, 1, 3)
    run = pl.measure(subject("diffllama"), **SPEC)
    assert run.summary.layer_names == ("0a", "0b", "1a", "1b", "2a", "2b")
    power, heads = run.summary.heads["all"].power["total"].value, run.heads
    assert len(heads) == power.size
    assert set(zip(heads["layer"], heads["call"], strict=True)) == {(call // 2, call) for call in range(6)}
    assert all(row.total == power[row.call, row.head] for row in heads.itertuples())


def test_results_carry_the_models_numbers(folder: Path) -> None:
    run = Run.load(folder)
    assert run.record.calibration.numbers == (1, 3)
    assert run.data["layer"].values.tolist() == [1, 3]
    assert run.data["call"].values.tolist() == [0, 1]
    assert [(row["layer"], row["call"]) for row in run.as_dict()["layers"]] == [(1, 0), (3, 1)]
    heads = pq.read_table(folder / "heads.parquet").to_pylist()
    assert {(row["layer"], row["call"]) for row in heads} == {(1, 0), (3, 1)}
    cell = next(r for r in heads if (r["layer"], r["head"], r["quantity"], r["component"]) == (3, 2, "power", "total"))
    assert cell["value"] == run.summary.heads[cell["queries"]].power["total"].value[1, 2]


def test_tables_show_them(folder: Path) -> None:
    console = Console(width=120, file=StringIO(), record=True)
    for item in run_tables(Run.load(folder)):
        console.print(item)
    lines = [line.split() for line in console.export_text().splitlines()]
    begin = next(k for k, line in enumerate(lines) if line[:2] == ["layer", "total"])
    assert [line[0] for line in lines[begin + 1 : begin + 3]] == ["1", "3"]


def test_the_page_and_its_tables_show_them(folder: Path, tmp_path: Path) -> None:
    views, _ = gather([folder])
    by_name = tables(views)
    for name in ("layers", "heads", "queries", "sink_profile"):
        assert {row["layer"] for row in by_name[name]} == {1, 3}, name
    page = tmp_path / "page.html"
    pl.report([folder], page)
    text = page.read_text(encoding="utf-8")
    data = json.loads(text.split('id="data">', 1)[1].split("</script>", 1)[0])
    (run,) = data["runs"]
    assert run["names"] == ["1", "3"]
    lines = [each for each in run["figures"]["depth-all"]["data"] if each.get("name") == "total"]
    assert lines[0]["x"] == [1, 3]
    assert run["figures"]["sink-profile"]["data"][0]["y"] == [1, 3]


def test_edits_take_them(hybrid: Subject, folder: Path) -> None:
    """In the last layer with attention, its own reads change; in the one before nothing does."""
    plain, cut = Run.load(folder), pl.measure(hybrid, **SPEC, edits=["sink=cut@3"])
    (touched,) = cut.record.touched
    assert (touched.layers, touched.calls, touched.heads) == ((3,), 1, 4)
    first, last = (
        np.abs((plain.data["attention_0"] - cut.data["attention_0"]).sel(layer=number).values).max()
        for number in (1, 3)
    )
    assert first == 0
    assert last > 0.01


def test_origin_says_the_same(hybrid: Subject) -> None:
    result = origin(hybrid, length=48, prompts=4, tokens=32)
    assert [call.layer for call in result.reading.calls] == [1, 3]


def test_notes_name_them(hybrid: Subject) -> None:
    """Warnings about layers, such as an origin that is too narrow, use the same numbers."""
    from posleak.runs.notes import result_notes

    run = pl.measure(hybrid, **SPEC, origin=1)
    wide = run.data.copy(deep=True)
    wide["profile"][:] = 0.0
    wide["ordinary"][:] = 0.001
    wide["profile"][:, 1, :, 1:4] = 0.2
    (note,) = result_notes(Run(run.record, wide))
    assert "in layer 3:" in note


def test_the_table_of_a_trace_shows_them() -> None:
    """Trace is refused for hybrids; two calls of one layer show that its table takes the names, too."""
    trace = pl.trace(subject("diffllama"), **SPEC, by_layer=True)
    console = Console(width=120, file=StringIO(), record=True)
    console.print(trace_layers(trace))
    assert [line.split()[0] for line in console.export_text().splitlines()[1:]] == ["0a", "0b", "1a", "1b", "2a", "2b"]
    assert trace.ladder is not None
    assert trace.ladder.upto == (-1, 0, 1, 2)
    assert trace.as_dict()["layers"][3]["layer"] == 1
