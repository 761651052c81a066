"""Runs as they are found, the comparison and its formats, tables and figures for print. The page has its own tests."""

from __future__ import annotations

import importlib
import io
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Iterable
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
from posleak.analyses.claims.catalogue import REGISTRY, Finding, claim
from posleak.analyses.claims.examination import claims
from posleak.analyses.claims.lab import Lab
from posleak.analyses.trace.trace import CAUSES, SOURCES, Trace
from posleak.cli.commands import app
from posleak.errors import PosleakWarning, RunError
from posleak.leakage import Estimate, Jackknife, split
from posleak.leakage.summary import Decomposition
from posleak.models import Subject
from posleak.probe import default_plan
from posleak.probe.rows import reduce_rows
from posleak.reports.compare import compare
from posleak.reports.comparison_text import FORMATS, escape_latex
from posleak.reports.gather import gather
from posleak.reports.page import Page, script_json
from posleak.reports.tables import tables
from posleak.reports.terminal.run import run_tables
from posleak.runs.conditions import Conditions
from posleak.runs.folder import write_batch
from posleak.runs.record import read_record
from posleak.runs.run import Run
from posleak.runs.spec import MeasureSpec
from posleak.show.colours import power_range
from posleak.show.lines import PlainConsole
from posleak.show.notebook import compact_html
from posleak.show.numbers import effect, estimate, interval, number, percent
from posleak.show.words import lead
from support.errors import raises
from support.families import subject, tiny
from support.report_tiny import HOSTILE, NAME, PROMPTS, hostile_run, measured, traced
from support.runs_tiny import sealed


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("runs")
    return {
        "llama": measured(place / "llama"),
        "edited": measured(place / "edited", edits=("bos=zero",)),
        "gemma": measured(place / "gemma", "gemma3_text", layers=3, heads=5, seed=1),
        "deep": measured(place / "deep", layers=2, heads=5),
        "hostile": hostile_run(place / "hostile"),
        "traced": traced(place / "traced"),
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
        chunk |= {"pairs": data["pairs"].values, "remainder": np.array(0.0)}
        write_batch(place, range(at, at + 1), chunk, record.digest)
    return place


def test_runs_that_cannot_be_shown_are_named_with_the_reason(folders: dict[str, Path], tmp_path: Path) -> None:
    other, corrupt = (Path(shutil.copytree(folders["llama"], tmp_path / name)) for name in ("other", "corrupt"))
    replace(read_record(other), definitions_version=9).write(other)
    (corrupt / "results.nc").write_bytes(b"damaged")
    found, refused = gather([folders["llama"], other, corrupt, tmp_path / "nothing"])
    assert [source.label for source in found] == ["tiny-llama"]
    reasons = {Path(each.name).name: each.reason for each in refused}
    assert "definitions" in reasons["other"]
    assert "corrupt" in reasons["corrupt"]
    assert "run.json" in reasons["nothing"]
    assert all(f"{each.name}" in Page.of(found, refused).html() for each in refused)


def of_version_1(source: Path, place: Path) -> Path:
    """A run folder as version 1 of the definitions left it: another format, other fields."""
    Path(shutil.copytree(source, place))
    record = json.loads((place / "run.json").read_text())
    del record["motion"], record["plan"]["origin"], record["spec"]["origin"]
    (place / "run.json").write_text(json.dumps(record | {"definitions_version": 1, "format_version": 2}))
    return place


def test_a_run_of_version_1_is_refused_with_the_reason_and_the_remedy(folders: dict[str, Path], tmp_path: Path) -> None:
    old = of_version_1(folders["llama"], tmp_path / "old")
    reason = "version 1"
    with raises(RunError, what=2, got=(old, reason), remedy="`posleak measure`"):
        compare([folders["llama"], old])
    with raises(RunError, what=1, got=(old, reason), remedy="`posleak measure`"):
        pl.report(old, tmp_path / "page.html")
    found = compare([folders["llama"], old, folders["deep"]])
    assert len(found.labels) == 2
    assert reason in found.refused[0].reason
    assert "--fresh" in found.refused[0].reason
    html = pl.report([folders["llama"], old], tmp_path / "page.html").read_text(encoding="utf-8")
    assert reason in html


def test_a_partial_run_is_shown_as_partial_and_not_compared(folders: dict[str, Path], tmp_path: Path) -> None:
    part = unfinished(folders["llama"], tmp_path / "part", 3)
    (source,), refused = gather([part])
    assert not refused
    assert (source.run.prompts, source.run.record.spec.prompts, source.partial) == (3, PROMPTS, True)
    assert f"3 of {PROMPTS} prompts" in Page.of([source]).html()
    with raises(RunError, what=2, got=(part, f"3 of {PROMPTS} prompts")):
        compare([folders["llama"], part])
    (_, refused) = gather([unfinished(folders["llama"], tmp_path / "one", 1)])
    assert f"1 of {PROMPTS} prompts" in refused[0].reason


def test_nothing_to_show_is_an_error_that_says_why(tmp_path: Path) -> None:
    with raises(RunError, what=1, got=(tmp_path / "nowhere", "run.json")):
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


def test_a_changed_verdict_or_array_is_left_out_with_a_note(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["hostile"], tmp_path / "run"))
    text = (folder / "claims.json").read_text()
    (folder / "claims.json").write_text(text.replace('"side": "above"', '"side": "below"', 1))
    arrays = bytearray((folder / "origin.nc").read_bytes())
    arrays[len(arrays) // 2] ^= 1
    (folder / "origin.nc").write_bytes(arrays)
    (shown,), _ = gather([folder])
    assert shown.claims is None
    assert shown.origin is None
    for name in ("claims.json", "origin.json"):
        (note,) = [note for note in shown.notes if note.startswith(name)]
        assert "changed" in note


def test_position_0_of_another_measurement_is_left_out(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["hostile"], tmp_path / "run"))
    record = json.loads((folder / "origin.json").read_text())
    (folder / "origin.json").write_text(sealed(record | {"digest": "0" * 64}))
    (shown,), _ = gather([folder])
    assert shown.origin is None
    (note,) = shown.notes
    assert note.startswith("origin.json")
    assert "another measurement" in note


def test_a_run_that_cannot_be_drawn_is_named_and_the_others_are_shown(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with it: first what stands beside it is left out, then the run."""
    module = importlib.import_module("posleak.reports.page")
    real = module.run_figures

    def run_figures(view: Any) -> Any:
        if view.run.path == folders["gemma"] or view.claims is not None:
            raise IndexError("unforeseen")
        return real(view)

    monkeypatch.setattr(module, "run_figures", run_figures)
    given = [folders["llama"], folders["gemma"], folders["hostile"]]
    written = module.write_report(given, tmp_path / "page.html", tmp_path / "assets")
    assert written.shown == ["tiny-llama", NAME]
    (refused,) = written.refused
    assert refused.name == str(folders["gemma"])
    assert refused.reason.endswith("IndexError: unforeseen")
    html = written.page.read_text(encoding="utf-8")
    assert re.search(r'role="note">[^<]* left out: [^<]*IndexError: unforeseen', html)
    with raises(RunError, what=1, got="IndexError: unforeseen"):
        pl.report([folders["gemma"]], tmp_path / "none.html")


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


def test_runs_of_one_model_are_weighted_by_the_attention_of_the_first(folders: dict[str, Path]) -> None:
    first, edited = (Run.load(folders[name]) for name in ("llama", "edited"))
    found = compare([first, edited])
    (row,) = [row for row in found.rows if (row.run, row.queries, row.minus) == (1, "all", None)]
    expected, own = (
        Decomposition.of(products["all"].averaged((0, 1)), Jackknife(PROMPTS))
        for products in (edited.weighted_by(first), edited.products)
    )
    assert row.cells["total"].value == pytest.approx(expected.power["total"].value)
    assert row.cells["drift"].value == pytest.approx(expected.share["drift"].value)
    assert row.cells["total"].value != pytest.approx(own.power["total"].value, rel=1e-3)
    assert "by that of tiny-llama" in found.legend


def split_by_norm(run: Run) -> Run:
    """Return a run with a large drift in a head that gets no weight: only evenly weighted, drift is the largest."""
    drift, weight = run.data["drift"].copy(deep=True), run.data["weight"].copy(deep=True)
    drift.values[:, 0, 0] += 20.0
    weight.values[:, 0, 0] = 0.0
    return Run(run.record, run.data.assign(drift=drift, weight=weight))


def test_evenly_weighted_shares_are_shown_where_they_lead_to_another_conclusion(folders: dict[str, Path]) -> None:
    plain = replace(Run.load(folders["traced"]), path=None)
    run = split_by_norm(plain)
    model = run.summary.model["all"]
    assert model.even is not None
    assert model.share["mask"].value > 0.5 > model.share["drift"].value
    value = percent(model.even.share["drift"].value)
    html = Page.of(gather([run])[0]).html()
    assert re.search(rf"Evenly weighted, all queries: .*drift</span> <b>{value}</b>", section(html, "answer"))
    shown = " ".join(" ".join(rendered(run_tables(run))).split())
    assert re.search(rf"evenly weighted, all +mask .* drift {value}", shown)
    assert "all, evenly weighted" in run._repr_html_()
    found = compare([run, plain])
    assert any("(1), all queries, evenly weighted: mask" in note and f"drift {value}" in note for note in found.notes)
    assert any("(2) − " in note and "drift −" in note for note in found.notes), "only evenly weighted, drift differs"
    for text in (section(Page.of(gather([plain])[0]).html(), "answer"), plain._repr_html_()):
        assert "venly weighted" not in text


def rendered(items: Iterable[Any]) -> list[str]:
    stream = io.StringIO()
    for item in items:
        PlainConsole(file=stream, width=200).print(item)
    return stream.getvalue().splitlines()


def test_a_notebook_shows_the_sources_that_are_asked_for(folders: dict[str, Path]) -> None:
    trace = Trace.load(folders["traced"])
    assert trace is not None
    text = compact_html("name", [], trace.model, trace.sources)
    assert "state" not in text
    assert all(f"{name} <b>{percent(trace.model['all'].share[name].value)}</b>" in text for name in trace.sources)


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
    assert {"sink_profile.csv", "trace.csv", "trace_heads.parquet"} <= names
    assert any(name.startswith("sink-profile-1") for name in names)
    assert any(name.startswith("both-1") and name.endswith(".png") for name in names)
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
    import posleak.reports  # noqa: F401

    assert pl.report([Run.load(folders["deep"])], tmp_path / "b.html").exists()


def estimated(cell: tuple[float, ...]) -> Estimate:
    value, low, high = map(np.asarray, cell)
    return Estimate(value, low, high, n=9)


def test_the_answer_is_said_as_strongly_as_the_intervals_allow() -> None:
    def shares(**given: tuple[float, float, float]) -> dict[str, Any]:
        return {name: estimated(cell) for name, cell in given.items()}

    clear = shares(mask=(0.1, 0.0, 0.2), drift=(0.8, 0.7, 0.9), sink=(0.1, 0.0, 0.2))
    ahead = shares(mask=(0.3, 0.2, 0.35), drift=(0.5, 0.4, 0.6), sink=(0.2, 0.1, 0.3))
    level = shares(mask=(0.5, 0.4, 0.6), drift=(0.46, 0.4, 0.52), sink=(0.04, 0.0, 0.1))
    wide = shares(mask=(0.5, 0.1, 0.9), drift=(0.4, -0.1, 0.9), sink=(0.1, -0.4, 0.6))
    assert lead(clear) == "leaks absolute position mostly through drift of the residual stream"
    assert "more through drift of the residual stream than through anything else" in lead(ahead)
    assert "through the causal mask and drift of the residual stream, with no" in lead(level)
    assert "possibly drift of the residual stream and possibly the sink at the first tokens, with no" in lead(wide)
    assert "no share is" in lead(shares(**dict.fromkeys(("mask", "drift", "sink"), (0.3, -0.2, 0.8))))
    assert "no significant leakage" in lead(shares(**dict.fromkeys(("mask", "drift", "sink"), (math.nan,) * 3)))

    cancelling = shares(earlier=(0.54, 0.51, 0.56), here=(0.52, 0.51, 0.53), origin=(-0.06, -0.1, -0.02))
    assert "from masks of earlier layers (through the residual stream) and each layer’s own mask, " in lead(cancelling)
    mostly = shares(earlier=(0.8, 0.7, 0.9), here=(0.15, 0.1, 0.2), origin=(0.05, 0.0, 0.1))
    assert lead(mostly).startswith("gets absolute position mostly from masks of earlier layers")
    recurrent = shares(
        state=(0.7, 0.6, 0.8),
        earlier=(0.1, 0.0, 0.2),
        here=(0.1, 0.0, 0.2),
        origin=(0.1, 0.0, 0.2),
        left=(0.9, 0.9, 0.9),
    )
    assert lead(recurrent) == "gets absolute position mostly from the state that other layers than attention carry"
    behind = shares(earlier=(0.9, 0.85, 0.95), here=(0.6, 0.55, 0.65), origin=(-0.5, -0.6, -0.4))
    assert "more from masks of earlier layers" in lead(behind), "two shares above one half: neither is most of it"


def test_without_an_interval_the_answer_claims_nothing_but_what_does_not_vary() -> None:
    alike = {"earlier": (0.0, 0.0, 0.0), "here": (1.0, math.nan, math.nan), "origin": (0.0, 0.0, 0.0)}
    same = {name: estimated(cell) for name, cell in alike.items()}
    assert "mostly from each layer’s own mask" in lead(same)
    few = {name: replace(share, n=2) for name, share in same.items()}
    assert "on 2 prompts; intervals need 4" in lead(few)


def section(html: str, name: str) -> str:
    return html.split(f'data-section="{name}"')[1].split("</section>")[0]


def test_a_page_with_a_trace_begins_with_where_position_comes_from(folders: dict[str, Path]) -> None:
    (source,), _ = gather([folders["traced"]])
    assert source.trace is not None
    assert source.notes == ()
    html = Page.of([source]).html()
    answer = section(html, "answer")
    assert HOSTILE not in html
    assert answer.index(lead(source.trace.model["all"].share)) < answer.index("Where is it read?")
    assert source.sources == CAUSES[1:], "without recurrent layers there is no state"
    for name in source.sources:
        share = source.trace.model["all"].share[name]
        assert f'<b>{percent(share.value)}</b> <span class="ci">{interval(share, "share")}' in answer
    assert "posleak trace" not in answer
    assert "posleak trace" in section(html, "method"), "the command that measures it again"
    assert "--by-layer" in section(html, "method")
    assert "borrowed in 0–1" in section(html, "depth")


def test_a_page_without_a_trace_says_how_to_get_one(folders: dict[str, Path]) -> None:
    html = Page.of(gather([folders["llama"]])[0]).html()
    answer = section(html, "answer")
    assert "posleak trace tiny-llama" in answer
    assert "earlier" not in answer
    assert lead(Run.load(folders["llama"]).summary.model["all"].share) in answer
    assert 'data-figure="both-all"' not in html


@pytest.mark.parametrize("missing", ["finished", "files"])
def test_a_trace_that_cannot_be_read_is_left_out_with_a_note(
    folders: dict[str, Path], tmp_path: Path, missing: str
) -> None:
    folder = Path(shutil.copytree(folders["traced"], tmp_path / "run"))
    second = folder / "conditions" / "context-branches"
    if missing == "finished":
        replace(read_record(second), finished=None).write(second)
    else:
        (second / "results.nc").write_bytes(b"damaged")
    (source,), refused = gather([folder])
    assert not refused
    assert source.trace is None
    assert source.notes[0].startswith("the trace")
    assert "posleak trace" in section(Page.of([source]).html(), "answer")


def test_a_trace_in_memory_can_be_reported(folders: dict[str, Path]) -> None:
    loaded = Trace.load(folders["traced"])
    assert loaded is not None
    memory = replace(loaded, ordinary=replace(loaded.ordinary, path=None))
    (source,), _ = gather([memory])
    assert source.trace is memory
    assert source.label == NAME


def test_a_run_under_a_borrowed_context_says_what_its_numbers_are(folders: dict[str, Path]) -> None:
    (source,), _ = gather([folders["traced"] / "conditions" / "context-branches"])
    assert "borrowed context" in section(Page.of([source]).html(), "answer")
    left = source.summary.model["all"].power["left"]
    assert estimate(left) in section(Page.of([source]).html(), "answer")


def test_tables_of_the_trace_have_its_numbers(folders: dict[str, Path]) -> None:
    found, _ = gather([folders["traced"], folders["llama"]])
    trace, made = found[0].trace, tables(found)
    assert trace is not None
    rows = {
        (r["layer"], r["queries"], r["quantity"], r["component"]): r for r in made["trace"] if r["norm"] == "attention"
    }
    assert {r["run"] for r in made["trace"]} == {found[0].label}
    assert {component for *_, component in rows} == {"total", "direct", *SOURCES, None}
    assert rows[None, "all", "order", None]["value"] == trace.model["all"].ratios["order"].value
    for name in ("earlier", "here", "origin", "direct"):
        assert rows[None, "early", "power", name]["value"] == trace.model["early"].power[name].value
        np.testing.assert_array_equal(
            [rows[k, "all", "power", name]["high"] for k in range(3)], trace.layers["all"].power[name].high
        )
    assert rows[2, "all", "share", "here"]["value"] == trace.layers["all"].share["here"].value[2]
    norms, queries, powers, shares, order = 2, 2, 7, 5, 1
    assert len(made["trace_heads"]) == norms * queries * (powers + shares + order) * 3 * 3
    ladder = {(r["lent_up_to"], r["layer"]): r["value"] for r in made["trace_by_layer"]}
    assert trace.ladder is not None
    assert [ladder[k, 1] for k in trace.ladder.upto] == trace.ladder.left.value[:, 1].tolist()
    profile = [r for r in made["sink_profile"] if (r["run"], r["layer"], r["head"]) == (found[1].label, 1, 2)]
    summary = found[1].run.summary
    assert [r["value"] for r in profile] == summary.profile.value[1, 2].tolist()
    assert {r["width"] for r in profile} == {int(summary.width[1, 2])}


def test_an_axis_fits_the_values_and_not_the_widest_band() -> None:
    def powers(high: float) -> dict[str, Any]:
        return {"total": Estimate(np.array([0.0, 1.0]), np.array([-0.1, -50.0]), np.array([0.1, high]), 8)}

    assert power_range(powers(50.0), ["total"]) == pytest.approx([-0.55, 2.05])
    assert power_range(powers(1.2), ["total"])[1] == pytest.approx(1.25)
    nan = np.full(2, np.nan)
    assert power_range({"total": Estimate(nan, nan, nan, n=1)}, ["total"]) == [0.0, 1.0]


def test_one_prompt_has_no_numbers_and_still_a_page(tmp_path: Path) -> None:
    with pytest.warns(PosleakWarning, match="prompts=4"):
        folder = measured(tmp_path / "one", prompts=1)
    html = Page.of(gather([folder])[0]).html()
    assert "n = 1 prompts; intervals need" in section(html, "answer")


def test_differences_of_runs_with_different_origins_are_noted(folders: dict[str, Path], tmp_path: Path) -> None:
    found = compare([folders["llama"], measured(tmp_path / "narrow", origin=1)])
    assert any("origin" in note and "(1, 4)" in note for note in found.notes)


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
    monkeypatch.setattr("posleak.analyses.claims.catalogue.REGISTRY", dict(REGISTRY))
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


def test_every_result_of_a_report_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With assets, too: page, figures and tables share what they show."""
    counts = Counter[str]()

    def count(place: str, name: str) -> None:
        module = importlib.import_module(place)
        real = getattr(module, name)

        def counted(*given: Any, **more: Any) -> Any:
            counts[name] += 1
            return real(*given, **more)

        monkeypatch.setattr(module, name, counted)

    who, folders = subject(num_hidden_layers=4), [tmp_path / "metrics", tmp_path / "traced"]
    for folder, metrics in zip(folders, (("sinks", "positions"), ()), strict=True):
        conditions = Conditions(who, MeasureSpec(length=64, prompts=4, metrics=metrics), folder)
        with conditions.writing():
            Trace.of(conditions)
    count("posleak.reports.view", "curves")
    count("posleak.reports.related", "agreements")
    count("posleak.reports.page", "comparison")
    count("posleak.reports.page", "comparison_figures")
    count("posleak.reports.metric_figures", "of_run")
    count("posleak.reports.page", "run_figures")
    loaded, real_load = Counter[Path](), Run.load.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(Run, "load", classmethod(lambda cls, path: loaded.update([Path(path)]) or real_load(cls, path)))
    pl.report(folders, tmp_path / "page.html", assets=tmp_path / "assets")
    once = {"agreements": 1, "comparison": 1, "comparison_figures": 1}
    assert counts == once | {"curves": 2, "run_figures": 2, "of_run": 2}
    branches = [folder / "conditions" / "context-branches" for folder in folders]
    assert loaded == Counter([*folders, *branches])


def test_runs_with_a_trace_are_compared_by_source(folders: dict[str, Path], tmp_path: Path) -> None:
    found = compare([folders["traced"], folders["llama"], folders["traced"]])
    trace = Trace.load(folders["traced"])
    assert trace is not None
    rows, names = {(row.run, row.queries, row.minus): row for row in found.rows}, SOURCES[1:]
    for queries in ("all", "early"):
        for name in names:
            share = rows[0, queries, None].cells[name]
            np.testing.assert_allclose(share.value, trace.model[queries].share[name].value)
            np.testing.assert_allclose([share.low, share.high], [
                trace.model[queries].share[name].low, trace.model[queries].share[name].high])  # fmt: skip
            assert rows[2, queries, 0].cells[name].value == 0
        assert not set(names) & set(rows[1, queries, None].cells)
        assert not set(names) & set(rows[1, queries, 0].cells)
    for text in (FORMATS["markdown"](found), FORMATS["latex"](found)):
        assert all(f" {name} " in text for name in names)
    made = found.as_dict()
    assert {"total", "residual", "mask", "drift", "sink", "stabilisation", "sink_attention", *names} == set(
        made["units"]
    )
    without = compare([folders["llama"], folders["edited"]])
    assert not set(names) & {*without.as_dict()["units"], *without.as_dict()["rows"][0]}
    views, _ = gather([folders["traced"], folders["llama"]])
    rows_ = tables(views, Page.of(views).comparison)["comparison"]
    assert {row["quantity"] for row in rows_} > set(names)


def test_a_borrowed_context_is_compared_by_what_it_leaves(folders: dict[str, Path]) -> None:
    """`borrowed` is a power, and `left`, what a trace leaves without a source, is a share."""
    borrowed = folders["traced"] / "conditions" / "context-branches"
    found = compare([borrowed, folders["llama"], folders["traced"]])
    left = Run.load(borrowed).summary.model["all"].power["left"]
    assert found.rows[0].cells["borrowed"].value == pytest.approx(left.value)
    assert (found.units["borrowed"], found.units["left"]) == ("nats²", "share")
    assert "left" not in found.rows[0].cells
    assert "left" in found.rows[2].cells


def test_a_damaged_trace_is_noted_in_a_comparison(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders["traced"], tmp_path / "run"))
    (folder / "conditions" / "context-branches" / "results.nc").write_bytes(b"damaged")
    found = compare([folders["llama"], folder])
    assert any("trace" in note and "corrupt" in note for note in found.notes)
    assert "earlier" not in found.units
