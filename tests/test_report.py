"""Runs as they are found, the comparison and its formats, tables and figures for print. The page has its own tests."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import posleak as pl
from families import tiny
from posleak.claims import Finding, Lab, claim, claims
from posleak.claims.catalogue import CLAIMS
from posleak.cli import main  # noqa: F401  registers the commands
from posleak.cli.app import app
from posleak.errors import RunError
from posleak.leakage import Estimate, split
from posleak.models import Subject
from posleak.probe import default_plan
from posleak.probe.rows import reduce_rows
from posleak.report import compare
from posleak.report.formats import FORMATS, escape_latex
from posleak.report.gather import gather
from posleak.report.page import Page, script_json
from posleak.runs import Run
from posleak.runs.folder import write_batch
from posleak.runs.record import read_record
from posleak.show.numbers import effect, number, percent
from posleak.show.words import lead
from report_tiny import HOSTILE, hostile_run, measured


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    return {
        "llama": measured(place / "llama"),
        "edited": measured(place / "edited", edits=("bos=zero",)),
        "gemma": measured(place / "gemma", "gemma3_text", layers=3, heads=5, seed=1),
        "deep": measured(place / "deep", layers=2, heads=5),
        "hostile": hostile_run(place / "hostile"),
    }


def unfinished(source: Path, place: Path, prompts: int) -> Path:
    """A run that was stopped after `prompts` prompts, one batch each."""
    record, data = read_record(source), Run.load(source).data
    place.mkdir()
    replace(record, finished=None, files={}, spec=replace(record.spec, batch=1)).write(place)
    for at in range(prompts):
        chunk = {
            str(name): array.values[at : at + 1] for name, array in data.data_vars.items() if "prompt" in array.dims
        }
        write_batch(place, range(at, at + 1), {**chunk, "pairs": data["pairs"].values, "remainder": np.array(0.0)})
    return place


def test_runs_that_cannot_be_shown_are_named_with_the_reason(folders: dict[str, Path], tmp_path: Path) -> None:
    other, corrupt = (Path(shutil.copytree(folders["llama"], tmp_path / name)) for name in ("other", "corrupt"))
    replace(read_record(other), definitions_version=0).write(other)
    (corrupt / "results.nc").write_bytes(b"damaged")
    found, refused = gather([folders["llama"], other, corrupt, tmp_path / "nothing"])
    assert [source.label for source in found] == ["tiny-llama"]
    reasons = {Path(each.name).name: each.reason for each in refused}
    assert "definitions" in reasons["other"]
    assert "corrupt" in reasons["corrupt"]
    assert "no run folder" in reasons["nothing"]
    assert all(f"{each.name}" in Page.of(found, refused).html() for each in refused)


def test_a_partial_run_is_shown_as_partial_and_not_compared(folders: dict[str, Path], tmp_path: Path) -> None:
    part = unfinished(folders["llama"], tmp_path / "part", 3)
    (source,), refused = gather([part])
    assert not refused
    assert (source.run.prompts, source.run.record.spec.prompts, source.partial) == (3, 4, True)
    assert "3 of 4 prompts are measured" in Page.of([source]).html()
    with pytest.raises(RunError, match="3 of 4 prompts"):
        compare([folders["llama"], part])
    (_, refused) = gather([unfinished(folders["llama"], tmp_path / "one", 1)])
    assert "1 of 4 prompts" in refused[0].reason


def test_nothing_to_show_is_an_error_that_says_why(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run folder"):
        pl.report([tmp_path / "nowhere"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_damage_beside_a_run_is_said_and_the_run_is_shown(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["hostile"], tmp_path / "run"))
    (folder / "claims.json").write_text("{")
    (folder / "origin.json").write_text("{")
    (source,), _ = gather([folder])
    assert source.claims is None
    assert source.origin is None
    assert any("claims.json" in note for note in source.notes)
    assert any("origin.json" in note for note in source.notes)


def test_a_comparison_has_each_runs_own_numbers(folders: dict[str, Path]) -> None:
    found = compare([folders["llama"], folders["deep"]])
    for k, name in enumerate(("llama", "deep")):
        summary = Run.load(folders[name]).summary
        for queries in ("all", "early"):
            (row,) = [r for r in found.rows if (r.run, r.queries, r.minus) == (k, queries, None)]
            for part in ("mask", "drift", "sink"):
                expected = summary.model[queries].share[part]
                np.testing.assert_allclose(row.cells[part].value, expected.value)
                np.testing.assert_allclose([row.cells[part].low, row.cells[part].high], [expected.low, expected.high])
    assert found.facts[0]["layers"] == 3
    assert found.facts[1]["layers"] == 2


def test_the_same_prompts_are_paired_and_others_are_not(folders: dict[str, Path]) -> None:
    paired = compare([folders["llama"], folders["edited"]])
    assert {row.paired for row in paired.rows if row.minus is not None} == {True}
    assert paired.labels[1].endswith("bos=zero")
    unpaired = compare([folders["llama"], folders["gemma"]])
    assert {row.paired for row in unpaired.rows if row.minus is not None} == {False}


def test_a_run_does_not_differ_from_itself_when_paired(folders: dict[str, Path]) -> None:
    found = compare([folders["llama"], folders["llama"]])
    difference = next(row for row in found.rows if row.minus is not None)
    assert all(cell.value == cell.low == cell.high == 0 for cell in difference.cells.values())


@pytest.mark.parametrize("form", ["markdown", "latex", "table", "json"])
def test_every_format_has_every_run_and_nothing_unescaped(folders: dict[str, Path], form: str) -> None:
    call = ["compare", str(folders["llama"]), str(folders["edited"]), str(folders["hostile"]), "--format", form]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    assert "bos=zero" in result.stdout.replace("\n", "").replace(" ", "")
    if form == "json":
        assert len(json.loads(result.stdout)["rows"]) == 2 * 5
    if form == "markdown":
        lines = [line for line in result.stdout.splitlines() if line.startswith("|")]
        assert len({line.replace("\\|", "").count("|") for line in lines}) == 1
        assert HOSTILE not in result.stdout


def test_latex_is_escaped() -> None:
    assert escape_latex("a_b & 50% of $x$ \\ {") == r"a\_b \& 50\% of \$x\$ \textbackslash{} \{"
    assert set(FORMATS) == {"markdown", "latex"}


def test_json_cannot_leave_its_script_element() -> None:
    hostile = {"name": "</script><script>alert(1)</script>\u2028&<!--"}
    text = str(script_json(hostile))
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == hostile


def test_assets_are_figures_and_every_table(folders: dict[str, Path], tmp_path: Path) -> None:
    written = CliRunner().invoke(
        app,
        ["report", str(folders["hostile"]), str(folders["llama"]), "--out", str(tmp_path / "p.html"), "--assets",
         str(tmp_path / "a"), "--json"],
    )  # fmt: skip
    assert written.exit_code == 0, written.output
    names = {Path(path).name for path in json.loads(written.stdout)["assets"]}
    assert {"heads.csv", "heads.parquet", "layers.csv", "claims.csv", "edits.csv", "portrait.csv"} <= names
    assert {"comparison.csv", "comparison.parquet", "balance.png", "balance.svg", "queries.parquet"} <= names
    assert {Path(name).suffix for name in names} == {".csv", ".parquet", ".png", ".svg"}
    heads = pq.read_table(tmp_path / "a" / "heads.parquet")
    own = pq.read_table(folders["llama"] / "heads.parquet")
    mine = heads.filter(np.asarray(heads["run"].to_pylist()) == "tiny-llama")
    np.testing.assert_array_equal(mine["value"].to_numpy(), own["value"].to_numpy())
    assert pyarrow.csv.read_csv(tmp_path / "a" / "heads.csv").num_rows == heads.num_rows


def test_a_run_shows_itself_in_a_notebook(folders: dict[str, Path]) -> None:
    text = Run.load(folders["hostile"])._repr_html_()
    assert HOSTILE not in text
    assert "&lt;script&gt;" in text
    assert len(text) < 6000
    assert "mask" in text


def test_the_package_can_be_called_before_and_after_it_is_imported(folders: dict[str, Path], tmp_path: Path) -> None:
    assert pl.report(folders["deep"], tmp_path / "a.html").exists()
    import posleak.report  # noqa: F401

    assert pl.report([Run.load(folders["deep"])], tmp_path / "b.html").exists()


@pytest.mark.parametrize("name", ["report", "claims", "doctor"])
def test_packages_that_can_be_called_show_the_options_of_their_function(name: str) -> None:
    package = importlib.import_module(f"posleak.{name}")
    assert inspect.signature(getattr(pl, name)) == inspect.signature(getattr(package, name))
    assert callable(package)


def estimated(cell: tuple[float, ...]) -> Estimate:
    value, low, high = map(np.asarray, cell)
    return Estimate(value, low, high, n=9)


def test_the_answer_is_said_as_strongly_as_the_intervals_allow() -> None:
    def shares(**given: tuple[float, float, float]) -> dict[str, Any]:
        return {name: estimated(cell) for name, cell in given.items()}

    clear = shares(mask=(0.1, 0.0, 0.2), drift=(0.8, 0.7, 0.9), sink=(0.1, 0.0, 0.2))
    ahead = shares(mask=(0.3, 0.2, 0.35), drift=(0.5, 0.4, 0.6), sink=(0.2, 0.1, 0.3))
    level = shares(mask=(0.5, 0.4, 0.6), drift=(0.46, 0.4, 0.52), sink=(0.04, 0.0, 0.1))
    assert "mostly from drift" in lead(clear)
    assert "more from drift of the residual stream than" in lead(ahead)
    assert "the causal mask and drift of the residual stream, neither" in lead(level)
    nothing = shares(**dict.fromkeys(("mask", "drift", "sink"), (math.nan,) * 3))
    assert "not" in lead(nothing) or "no leakage" in lead(nothing)


def test_numbers_as_text() -> None:
    assert [percent(x) for x in (0.314, -0.04, 0.003, 0.0, math.nan)] == ["31%", "−4%", "0.3%", "0%", "–"]
    assert [number(x) for x in (0.0, 1.2345, -12345.0, 3.2e-9, math.nan)] == ["0", "1.23", "−12345", "3.2e−9", "–"]


@pytest.mark.parametrize(
    ("cell", "unit", "said"),
    [
        ((0.39, 0.22, 0.5), "share removed", "39% (22% … 50%) removed"),
        ((-0.13, -0.67, 0.23), "share removed", "−13% (−67% … 23%) removed"),
        ((-18.4, -23.8, -14.3), "share removed", "grew 19.4 (15.3 … 24.8) times"),
        ((4.51, 4.17, 4.96), "times", "×4.51 (×4.17 … ×4.96)"),
        ((0.83, 0.66, 1.02), "nats²", "0.83 (0.66 … 1.02) nats²"),
    ],
)
def test_an_effect_is_said_in_words_that_need_no_arithmetic(cell: tuple[float, ...], unit: str, said: str) -> None:
    assert " ".join(effect(estimated(cell), unit)) == said


def outside(lab: Lab) -> Finding:
    """Half of the queries see half as far."""
    kept = lab.kept("mask", "window=9")
    return Finding.of(kept.ratio, "times", no_effect=1.0, edited=lab.edited("window=9", "a narrow window", kept))


def test_a_claim_from_outside_is_shown_in_its_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of report/ knows it: the page shows whatever claims a run has, and edits where a claim is about one."""
    monkeypatch.setattr("posleak.claims.catalogue.CLAIMS", dict(CLAIMS))
    claim(
        99,
        "outside",
        "A title from outside",
        "Windows lower what the mask leaks.",
        "window=9",
    )(outside)
    claims(Subject.of(tiny("llama"), name="tiny"), out=tmp_path / "run", length=64, prompts=4)
    html = Page.of(gather([tmp_path / "run"])[0]).html()
    answer, edits = (html.split(f'data-section="{name}"')[1].split("</section>")[0] for name in ("answer", "edits"))
    assert "<b>A title from outside</b>" in answer
    assert "99. Windows lower what the mask leaks." in answer
    assert "a narrow window" in edits
    assert "A title from outside" in edits
    assert ">outside<" not in html, "an id is nothing to show a person"


def test_stored_parts_give_back_the_logits() -> None:
    """s_i(δ) = drift + renormalisation + logit: what the head panel draws is what entered the softmax."""
    plan = default_plan(64)
    positions = torch.tensor(plan.rows)
    logits = 3 * torch.randn(2, 3, len(plan.rows), 64, dtype=torch.float64)
    rows = reduce_rows(logits, torch.arange(64) <= positions[:, None], plan)
    parts = split(rows)
    found = parts.drift + parts.renormalisation[..., None] + parts.logit[:, :, None]
    for q, i in enumerate(plan.queries):
        for d, offset in enumerate(plan.offsets):
            if parts.pairs[q, d]:
                torch.testing.assert_close(found[:, :, q, d], logits[:, :, q, i - offset])
    assert int(parts.pairs.sum()) > 100
