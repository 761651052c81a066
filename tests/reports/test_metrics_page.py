"""What others measure, on the page: there only if a run has it, with the run's own numbers, ranked as it should be."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.stats import spearmanr, t

import posleak as pl
from posleak.analyses.trace.trace import Trace
from posleak.errors import InputError, PosleakWarning, RunError
from posleak.metrics import table
from posleak.metrics.agreement import Family, agreement, alignments
from posleak.metrics.catalogue import BY_ID, CATALOGUE, Looks
from posleak.reports import related
from posleak.reports.gather import gather
from posleak.reports.metric_figures import grouped, label
from posleak.reports.page import Page
from posleak.reports.related import STATES, TWICE, RelatedMetrics, agreements
from posleak.reports.tables import tables
from posleak.runs.conditions import Conditions
from posleak.runs.run import Run
from posleak.runs.spec import MeasureSpec
from posleak.show import numbers
from support.errors import raises
from support.families import subject
from support.report_tiny import HOSTILE, NAME, browser, measured, opened
from tools import metric_docs
from tools.markdown import read_part

ROOT = Path(__file__).parents[2]
LAYERS, HEADS = 6, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace whose ordinary run has all metrics; the model's name is a script."""
    place = tmp_path_factory.mktemp("metrics") / "run"
    who = subject(name=NAME, scale=3.0, num_hidden_layers=LAYERS, num_attention_heads=HEADS)
    conditions = Conditions(who, MeasureSpec(length=64, prompts=8, metrics=("all",)), place)
    with conditions.writing(), pytest.warns(PosleakWarning, match="natural text"):
        Trace.of(conditions)
    return place


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measured(tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture
def metrics_run(folder: Path) -> Run:
    """Loaded anew, since tests plant numbers in it."""
    return Run.load(folder)


def section(page: str) -> str:
    return page.partition('<section data-section="metrics"')[2].partition("</section>")[0]


def words(text: str) -> str:
    """HTML as text."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def test_the_section_is_there_only_if_a_run_has_metrics(folder: Path, plain: Path, tmp_path: Path) -> None:
    without = pl.report(plain, tmp_path / "without.html").read_text(encoding="utf-8")
    assert section(without) == ""
    assert 'data-go="metrics"' not in without
    both = pl.report([plain, folder], tmp_path / "both.html").read_text(encoding="utf-8")
    assert both.count('<section data-section="metrics"') == 1
    assert both.count('data-go="metrics"') == 1


def test_the_table_has_the_runs_numbers(metrics_run: Run) -> None:
    found, _ = gather([metrics_run])
    shown = section(Page.of(found).html())
    assert metrics_run.metrics is not None
    assert len(metrics_run.metrics.rows) > 30
    for row in metrics_run.metrics.rows:
        line = words(shown.partition(f'data-metric="{row.metric.id}"')[2].partition("</tr>")[0])
        value, ends = numbers.shown(row.value.value, row.metric.unit), numbers.interval(row.value, row.metric.unit)
        for text in (value, ends, str(row.value.n), row.metric.definition, row.metric.source, row.metric.published):
            assert text in line, (row.metric.id, text)


def test_frames_and_states_have_the_runs_numbers(metrics_run: Run) -> None:
    (shown,), _ = gather([metrics_run])
    page = Page.of([shown])
    figures, metrics = page.runs[0].data["figures"], metrics_run.metrics
    assert metrics is not None
    bars = {trace["name"]: trace for trace in figures["frames"]["data"]}
    for name, kind in (("centralized", "centralized"), ("none", "no_frame")):
        assert bars[name]["y"] == pytest.approx([float(each.shares[kind].value) for each in metrics.frames])
    assert [text for _, text, _ in bars["type"]["customdata"]] == [each.words for each in metrics.frames]
    for array in ("norm_0", "spectrum_entropy", "largest", "probe_error"):
        drawn = figures[f"by-depth-{array}"]["data"][1]["y"]
        np.testing.assert_array_equal(drawn, metrics.depths[array].value)
        assert numbers.number(metrics.depths[array].value[2]) in section(page.html())


def test_the_maps_and_their_tables_have_the_agreement(folder: Path) -> None:
    (shown,), _ = gather([folder])
    page = Page.of([shown])
    for over, found in agreements(shown.run, shown.trace).items():
        assert {"earlier", "here", "origin"} < set(found.columns)
        rows = grouped(found.rows)
        cells = np.full((len(rows), 8), np.nan)
        for trace in page.runs[0].data["figures"][f"agreement-{over}"]["data"]:
            z = np.array(trace["z"], dtype=float)
            cells = np.where(np.isnan(cells), z, cells)
        table_ = words(section(page.html()).partition(f'data-over="{over}"')[2].partition("</table>")[0])
        for y, name in enumerate(rows):
            if isinstance(name, str):
                expected = found.rho[found.rows.index(name), :8]
                np.testing.assert_allclose(cells[y], np.nan_to_num(expected))
                assert label(name) in table_
                assert all(numbers.number(x) in table_ for x in expected)
            else:
                assert np.isnan(cells[y]).all()


def test_every_text_of_a_metric_is_escaped(metrics_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    strange = replace(
        BY_ID["entropy_position"], title=HOSTILE, definition=HOSTILE, source=HOSTILE, blind=HOSTILE, published=HOSTILE
    )
    listed = tuple(strange if each.id == strange.id else each for each in CATALOGUE)
    monkeypatch.setattr(table, "CATALOGUE", listed)
    monkeypatch.setitem(BY_ID, strange.id, strange)
    found, _ = gather([metrics_run])
    page = Page.of(found).html()
    assert HOSTILE not in page
    assert section(page).count(html.escape(HOSTILE)) == 7
    assert r"\u0026lt;script\u0026gt;" in page  # in the hover texts of the maps


def test_metrics_that_cannot_be_shown_do_not_take_the_run_away(
    metrics_run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("no such depth")

    monkeypatch.setattr(related, "agreement", broken)
    pl.report(metrics_run, tmp_path / "page.html", assets=tmp_path / "a")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert section(page) == ""
    assert "ValueError: no such depth" in words(page)
    assert (tmp_path / "a" / "layers.csv").exists()
    assert not (tmp_path / "a" / "metrics.csv").exists()


def test_the_command_asks_for_the_metrics(tmp_path: Path) -> None:
    found, _ = gather([measured(tmp_path / "run", metrics="sinks,frames")])
    assert "--metrics sinks,frames" in Page.of(found).views[0].command


@pytest.mark.parametrize("layers", [1, 2])
def test_models_of_few_layers_have_no_intervals_and_still_a_section(layers: int, tmp_path: Path) -> None:
    with pytest.warns(PosleakWarning, match="natural text"):
        folder = measured(tmp_path / "run", layers=layers, metrics="all")
    (shown,), _ = gather([folder])
    others = RelatedMetrics.of(shown.run)
    assert others is not None
    assert all(np.isnan(found.low).all() for found in others.agreements.values())
    *seen, (neither, every) = others.families
    assert neither == "neither"
    assert all(not group for _, group in seen)
    assert len(every) == sum(len(found.rows) for found in others.agreements.values()) > 10
    assert "(no interval)" in section(Page.of([shown]).html())


# -- agreement ---------------------------------------------------------------------------------------------------------


def planted(run: Run, **heads: Any) -> Run:
    """The run with these values [L, H], the same in every prompt, in the place of its metrics of heads."""
    arrays = {name: run.data[name].copy() for name in heads}
    for name, value in heads.items():
        arrays[name].values[:] = value
    return Run(run.record, run.data.assign(arrays), run.path)


def test_a_metric_that_is_the_mask_agrees_with_it(metrics_run: Run) -> None:
    """As far as two halves of the prompts agree about the mask."""
    mask = metrics_run.summary.heads["all"].power["mask"].value
    found = agreements(planted(metrics_run, entropy_position=mask**3, entropy_spectrum=-mask))["heads"]
    at = found.columns.index("mask")
    up, down = (found.rows.index(name) for name in ("entropy_position", "entropy_spectrum"))
    assert found.rho[up, at] > 0.6
    assert found.rho[down, at] == pytest.approx(-found.rho[up, at])
    assert found.rho[up, found.columns.index("entropy_position")] == pytest.approx(1)
    assert found.n == mask.size
    by_name = {each.metric: each for each in alignments(found)}
    assert by_name["entropy_position"].family is by_name["entropy_spectrum"].family is Family.MASK
    assert all("mask" in by_name[name].words for name in ("entropy_position", "entropy_spectrum"))
    assert by_name["entropy_position"].words != by_name["entropy_spectrum"].words, "one order is the reverse"


@pytest.mark.parametrize("name", ["delta_r2", "shift_own"])
def test_what_cannot_see_the_mask_is_never_said_to_see_it(name: str, metrics_run: Run) -> None:
    mask = metrics_run.summary.heads["all"].power["mask"].value
    found = {each.metric: each for each in alignments(agreements(planted(metrics_run, **{name: mask}))["heads"])}[name]
    assert not found.sees_mask
    assert found.family is not Family.MASK
    assert Family.MASK not in found.strongest


def test_agreement_is_scipys_and_its_interval_leaves_out_layers() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 7, 5))
    y = y + x
    x[2, 3] = np.nan  # a head that does not exist
    found = agreement([{"x": x}] * 2, [{"y": y}] * 2, "heads")
    at = found.columns.index("y")
    there = np.isfinite(x)
    expected = spearmanr(x[there], y[there]).statistic
    assert found.rho[0, at] == pytest.approx(expected)
    assert found.n == 34
    keep = [there & (np.arange(7) != left)[:, None] for left in range(7)]
    without = np.arctanh([spearmanr(x[k], y[k]).statistic for k in keep])
    reach = t.ppf(0.975, 6) * np.sqrt(6 / 7 * ((without - without.mean()) ** 2).sum())
    assert found.low[0, at] == pytest.approx(np.tanh(np.arctanh(expected) - reach))
    assert found.high[0, at] == pytest.approx(np.tanh(np.arctanh(expected) + reach))


def test_what_has_nothing_to_rank_is_left_out(metrics_run: Run) -> None:
    shape = metrics_run.summary.heads["all"].power["total"].value.shape
    found = agreements(planted(metrics_run, selectivity=np.full(shape, np.nan)))
    assert not set(TWICE) & {*found["heads"].rows, *found["layers"].rows}
    assert metrics_run.metrics is not None
    assert set(TWICE) <= set(metrics_run.metrics.heads)
    assert "selectivity" not in found["heads"].rows
    assert found["heads"].n == LAYERS * HEADS
    assert set(STATES) < set(found["layers"].rows)


def test_states_are_compared_with_the_layer_that_reads_them(metrics_run: Run) -> None:
    """Planted: what is at depth d is what layer d has."""
    values = np.array([3.0, 1.0, 5.0, 0.0, 4.0, 2.0])[:LAYERS]
    with_layers = planted(metrics_run, fiedler=values, probe_error=np.append(values, 9.0))
    found = agreements(with_layers)["layers"]
    assert found.rho[found.rows.index("probe_error"), found.columns.index("fiedler")] == pytest.approx(1.0)


def test_rows_are_grouped_by_what_they_look_at(metrics_run: Run) -> None:
    for found in agreements(metrics_run).values():
        order = [BY_ID[name].looks for name in found.rows]
        assert order == sorted(order, key=list(Looks).index)
    assert grouped(("toeplitz", "star")) == [Looks.LOGITS, "toeplitz", Looks.ATTENTION, "star"]


def test_without_metrics_there_is_nothing_to_compare(plain: Path) -> None:
    run = Run.load(plain)
    assert agreements(run) == {}
    assert RelatedMetrics.of(run) is None


# -- tables and the documentation --------------------------------------------------------------------------------------


def test_tables_have_every_number(folder: Path, tmp_path: Path) -> None:
    (shown,), _ = gather([folder])
    made, metrics = tables([shown]), shown.run.metrics
    assert metrics is not None
    listed = np.array([row["value"] for row in made["metrics"]], dtype=float)
    np.testing.assert_array_equal(listed, [float(row.value.value) for row in metrics.rows])
    layers = {(row["metric"], row["call"]): row["value"] for row in made["metric_layers"]}
    assert layers["fiedler", 3] == metrics.layers["fiedler"].value[3]
    depths = {(row["array"], row["depth"]): row["value"] for row in made["metric_depths"]}
    assert depths["norm_0", LAYERS] == metrics.depths["norm_0"].value[LAYERS]
    frames = {(row["call"], row["quantity"]): row for row in made["frames"]}
    assert frames[2, "margin"]["value"] == metrics.frames[2].margin.value
    assert frames[2, "margin"]["kind"] == metrics.frames[2].kind
    found = agreements(shown.run, shown.trace)["heads"]
    rho = {(row["over"], row["metric"], row["with"]): row["value"] for row in made["agreement"]}
    assert rho["heads", "toeplitz", "earlier"] == found.cell(found.rows.index("toeplitz"), "earlier").rho
    assert {(row["quantity"], row["component"]) for row in made["heads"]} > {("metric", "toeplitz")}
    pl.report(folder, tmp_path / "page.html", assets=tmp_path / "a")
    assert {"agreement.png", "frames.svg", "states.png", "agreement.csv"} <= {
        p.name for p in (tmp_path / "a").iterdir()
    }
    assert pq.read_table(tmp_path / "a" / "heads.parquet").drop_columns("run").sort_by("component") is not None
    assert len(pq.read_table(tmp_path / "a" / "heads.parquet")) == len(pq.read_table(folder / "heads.parquet"))


def test_the_table_of_metrics_in_the_documentation_is_current() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    made = read_part(page, "catalogue")
    assert made == metric_docs.catalogue(), "run `python -m tools.metric_docs docs/metrics.md`"
    assert all(f"(`{metric.id}`)" in made for metric in CATALOGUE)


def test_the_tool_replaces_what_it_makes_and_nothing_else(folder: Path, plain: Path, tmp_path: Path) -> None:
    page = tmp_path / "metrics.md"
    names = ("catalogue", "results", "agreement", "seen")
    page.write_text("".join(f"before {n}\n<!-- made: {n} -->\nold\n<!-- end: {n} -->\n" for n in names) + "end\n")
    metric_docs.main([str(page)])
    assert read_part(page.read_text(), "results") == "old"
    metric_docs.main([str(page), str(folder)])
    first = page.read_text(encoding="utf-8")
    metric_docs.main([str(page), str(folder)])
    assert page.read_text(encoding="utf-8") == first
    assert (
        re.sub(r"(?s)<!-- made.*?<!-- end: \w+ -->\n", "", first) == "".join(f"before {n}\n" for n in names) + "end\n"
    )
    metrics = Run.load(folder).metrics
    assert metrics is not None
    for row in metrics.rows:
        assert numbers.estimate(row.value, row.metric.unit) in read_part(first, "results")
    (picture,) = re.findall(r"\]\((images/.*)\)", read_part(first, "agreement"))
    assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    with raises(RunError, where=plain, remedy="--metrics all"):
        metric_docs.main([str(page), str(plain)])
    page.write_text("no markers")
    with raises(InputError, where="made: catalogue", remedy=("made: catalogue", "end: catalogue")):
        metric_docs.main([str(page)])


# -- in a browser ------------------------------------------------------------------------------------------------------

in_browser = pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    return pl.report(folder, folder.parent / "page.html")


@pytest.mark.page
@in_browser
@pytest.mark.parametrize("width", [400, 1280])
def test_the_figures_are_drawn(chromium: Any, page: Path, width: int) -> None:
    seen = opened(chromium, page, width=width)
    assert seen.errors == []
    assert seen.requests == []
    spots = seen.page.locator('[data-section="metrics"] [data-figure]')
    assert spots.count() == 2 * 2 + 1 + 4
    for at in range(spots.count()):
        assert spots.nth(at).locator(".main-svg").count() > 0
    assert seen.page.locator('[data-figure="agreement-heads"] .hm image').count() >= 1
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    texts = seen.page.locator('[data-figure="alike-heads"] .hm text').all_text_contents()  # some are significant
    assert any(len(text) > 1 for text in texts) == (width == 1280), "numbers only where they fit"


@pytest.mark.page
@in_browser
def test_a_cell_says_its_number_interval_and_n(chromium: Any, page: Path, folder: Path) -> None:
    (shown,), _ = gather([folder])
    found = agreements(shown.run, shown.trace)["heads"]
    seen = opened(chromium, page).page
    spot = seen.locator('[data-figure="agreement-heads"]')
    spot.scroll_into_view_if_needed()
    row, column = grouped(found.rows).index("sink_attention"), 1
    x, y = seen.evaluate(
        "([x, y]) => { const spot = document.querySelector('[data-figure=agreement-heads]'),"
        " box = spot.getBoundingClientRect(), { xaxis, yaxis } = spot._fullLayout;"
        " return [box.x + xaxis._offset + xaxis.l2p(x), box.y + yaxis._offset + yaxis.l2p(y)]; }",
        [column, row],
    )
    seen.mouse.move(x, y)
    seen.wait_for_function("document.querySelector('[data-figure=agreement-heads] .hovertext')")
    part = found.cell(found.rows.index("sink_attention"), found.columns[column])
    text = spot.locator(".hoverlayer").text_content()
    assert text.startswith(f"{BY_ID['sink_attention'].title} · {found.columns[column]}: ρ = {numbers.number(part.rho)}")
    assert f"({numbers.number(part.low)} … {numbers.number(part.high)}), n = {LAYERS * HEADS} heads" in text


@pytest.mark.page
@in_browser
def test_on_paper_definitions_are_open_and_closed_again(chromium: Any, page: Path) -> None:
    seen = opened(chromium, page).page
    first = seen.locator("details.definition").first
    opened_ = "[...document.querySelectorAll('details.definition')].filter((each) => each.open).length"
    first.locator("summary").click()
    seen.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert seen.evaluate(opened_) == seen.locator("details.definition").count() > 30
    seen.evaluate("dispatchEvent(new Event('afterprint'))")
    assert seen.evaluate(opened_) == 1
