"""The circuit in a report: its section, drawing, figures and tables show the numbers of the dataclasses."""

from __future__ import annotations

import html
import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

import posleak as pl
from posleak.analyses.circuit.circuit import Circuit
from posleak.analyses.circuit.writing import Writing
from posleak.analyses.trace.trace import Trace
from posleak.leakage import Estimate
from posleak.reports import circuit_figures
from posleak.reports.circuit_drawing import Drawing, draw_circuit
from posleak.reports.gather import gather
from posleak.reports.page import Page
from posleak.reports.tables import tables
from posleak.show.numbers import estimate, interval, percent
from support.report_tiny import HOSTILE, browser, made_up_circuit, opened, traced, with_circuit

in_browser = [
    pytest.mark.page,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium: `make test` installs it where it may"),
]


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trace and no circuit."""
    return traced(tmp_path_factory.mktemp("circuit") / "plain")


@pytest.fixture(scope="module")
def folder(plain_folder: Path) -> Path:
    """Return the same folder with a made-up circuit."""
    copy = Path(shutil.copytree(plain_folder, plain_folder.parent / "with"))
    with_circuit(copy)
    return copy


@pytest.fixture(scope="module")
def circuit(folder: Path) -> Circuit:
    loaded = Circuit.load(folder)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def path(folder: Path) -> Path:
    return pl.report(folder, folder.parent / "page.html")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def text(path: Path) -> str:
    return section(path.read_text(encoding="utf-8"))


def section(page: str) -> str:
    return page.split('data-section="circuit"')[1].split("</section>")[0]


def words(part: str) -> str:
    """Return the text of HTML without tags."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", part)).split())


def drawn(circuit: Circuit) -> Drawing:
    (view,), _ = gather([circuit])
    drawing = draw_circuit(view)
    assert drawing is not None
    return drawing


def without_writers(circuit: Circuit) -> Circuit:
    """Return the circuit of a model in which nothing is significant."""
    nan = np.asarray(math.nan)
    nothing = Estimate(nan, nan, nan, circuit.trace.ordinary.prompts)

    def undefined(effect: Any) -> Any:
        return replace(effect, removed=nothing, others=None, random=None, difference=None, draws=())

    rows = tuple(
        replace(row, leading=undefined(row.leading), even=undefined(row.even)) for row in circuit.writing.removed
    )
    writing = replace(circuit.writing, removed=rows, writers=(), edges=(), reached=False)
    return replace(circuit, writing=writing, carrier=None, erasure=(), warnings=("left out: two streams",))


def test_the_section_follows_the_answer_and_needs_a_circuit(plain_folder: Path, path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    order = re.findall(r'data-section="(\w+)"', page.split("<script>")[0])
    assert order[:3] == ["answer", "circuit", "depth"]
    assert 'data-go="circuit"' in page
    (view,), _ = gather([plain_folder])
    without = Page.of([view]).html()
    assert view.circuit is None
    assert 'data-section="circuit"' not in without
    assert 'data-go="circuit"' not in without


def test_sentences_warnings_and_every_interval_are_said(circuit: Circuit, text: str) -> None:
    said = words(text)
    assert len(circuit.sentences) >= 4
    assert all(sentence in said for sentence in circuit.sentences)
    assert re.search(r'class="sentence">([^<]*)<', text)[1] == circuit.sentences[0]  # type: ignore[index]
    assert f'role="note">{html.escape(HOSTILE)}' in text
    assert HOSTILE not in text, "not even in the source of the prompts of the loss"
    writers = words(text.split('data-table="writers"')[1].split("</table>")[0])
    assert all(estimate(head.alone, "share") in writers for head in circuit.writing.writers)
    for name, cells in {
        "readers": [(head.earlier, "") for head in circuit.writing.readers],
        "edges": [(edge.share, "share") for edge in circuit.writing.edges],
        "removed": [(row.even.removed, "share") for row in circuit.writing.removed],
        "erasure": [(row.earlier_removed, "share") for row in circuit.erasure],
    }.items():
        table = words(text.split(f'data-table="{name}"')[1].split("</table>")[0])
        assert cells
        assert all(estimate(cell, unit) in table for cell, unit in cells), name
    assert circuit.carrier is not None
    rows = re.findall("<tr>(.*?)</tr>", text.split('data-table="carrier"')[1].split("</table>")[0], re.S)[1:]
    for depth, row in enumerate(rows):
        assert interval(circuit.carrier.share[depth], "share") in words(row)
        assert interval(circuit.carrier.leading[depth], "share") in words(row)


def test_no_number_of_the_section_is_without_n(circuit: Circuit, text: str) -> None:
    n = circuit.trace.ordinary.prompts
    for heading in re.findall(r"<summary>(.*?)</summary>", text):
        assert f"n = {n} prompts" in heading
    for caption in re.findall(r"<figcaption>(.*?)</figcaption>", text, re.S):
        assert f"n = {n} prompts" in caption or "24 prompts" in caption
    assert all(f"n = {n} prompts" in node.text or "not measured" in node.text for node in drawn(circuit).nodes)
    assert all(f"n = {n} prompts" in link.text for link in drawn(circuit).links)


def test_a_circuit_in_memory_can_be_reported(plain_folder: Path, tmp_path: Path) -> None:
    trace = Trace.load(plain_folder)
    assert trace is not None
    made = made_up_circuit(replace(trace, ordinary=replace(trace.ordinary, path=None)))
    page = pl.report([made, trace], tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count('data-section="circuit"') == 1
    assert html.escape(made.sentences[0]) in page
    (view, _), _ = gather([made, trace])
    assert view.command.startswith("posleak circuit ")
    assert f"--prompts {2 * trace.ordinary.prompts}" in view.command


@pytest.mark.parametrize("damage", ["json", "sealed", "wrong head"])
def test_a_damaged_circuit_is_a_note_and_the_rest_is_shown(folder: Path, tmp_path: Path, damage: str) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "run"))
    stored = copy / "circuit.json"
    if damage == "wrong head":
        loaded = Circuit.load(copy)
        assert loaded is not None
        first = replace(loaded.writing.writers[0], call=99)
        with_circuit(copy, writing=replace(loaded.writing, writers=(first, *loaded.writing.writers[1:])))
    elif damage == "json":
        stored.write_text("{")
    else:
        stored.write_text(stored.read_text().replace('"reached": true', '"reached": false'))
    (view,), refused = gather([copy])
    page = Page.of([view]).html()
    assert not refused
    assert 'data-section="circuit"' not in page
    assert 'data-section="depth"' in page
    reason = "other results of the folder" if damage == "wrong head" else "circuit.json is left out"
    assert re.search(rf'role="note">{reason}', page)
    if damage != "wrong head":
        assert view.circuit is None
        assert view.trace is not None


def test_without_writers_the_section_says_so_and_draws_nothing(circuit: Circuit) -> None:
    (view,), _ = gather([without_writers(circuit)])
    part = section(Page.of([view]).html())
    assert "There is no drawing" in part
    assert "no head is reported as a writer" in part
    assert "two streams" in part
    for absent in ('class="drawing"', "data-figure", 'data-table="writers"', "curve-depth"):
        assert absent not in part
    assert circuit_figures.of_run(view) == {}


def test_figures_have_the_numbers_of_the_circuit(circuit: Circuit, folder: Path) -> None:
    (view,), _ = gather([folder])
    figures, carrier, rows = circuit_figures.of_run(view), circuit.carrier, circuit.writing.removed
    assert carrier is not None

    def line(figure: str, name: str) -> Any:
        return next(x for x in figures[figure]["data"] if x.get("name") == name and x.get("mode") != "lines")

    first = line("circuit-removed", "first k heads")
    assert (first["x"], first["y"]) == ([row.k for row in rows], [row.leading.removed.value for row in rows])
    assert first["customdata"] == [[row.leading.removed.low, row.leading.removed.high] for row in rows]
    means = [row.leading.random for row in rows if row.leading.random is not None]
    assert line("circuit-removed", "random heads, mean")["y"] == [mean.value for mean in means]
    draws = [draw for row in rows for draw in row.leading.draws]
    assert line("circuit-removed", "single random sets")["y"] == draws
    others = [row.leading.others for row in rows if row.leading.others is not None]
    assert line("circuit-removed", "all other heads")["y"] == [other.value for other in others]
    marks = [(shape["x0"], shape["y0"]) for shape in figures["circuit-removed"]["layout"]["shapes"]]
    assert (len(circuit.writing.writers), 0) in marks
    assert (0, 0.9) in marks

    (heat,) = figures["circuit-spectrum"]["data"]
    values = np.array(heat["customdata"], dtype=float)
    np.testing.assert_array_equal(values[..., 0], carrier.spectrum.value.T)
    np.testing.assert_array_equal(values[..., 2], carrier.spectrum.high.T)
    np.testing.assert_allclose(figures["circuit-alignment"]["data"][0]["z"], carrier.alignment, atol=1e-4)
    curve = figures["circuit-curve"]["data"][1]
    np.testing.assert_array_equal(curve["y"], carrier.curve.value[carrier.middle])
    erased = line("circuit-erasure", "erased")
    assert erased["x"] == [row.earlier_removed.value for row in circuit_figures.erasures(circuit.erasure)]
    loss = line("circuit-loss", "random directions")
    controls = [row.random_loss for row in circuit_figures.erasures(circuit.erasure)]
    assert loss["x"] == [control.value for control in controls if control is not None]
    assert len(loss["x"]) == len(controls)
    labels = figures["circuit-erasure"]["layout"]["yaxis"]["ticktext"]
    assert len(set(labels)) == len(labels) == 4, "an erasure at some depths has a name of its own"


def test_the_drawing_has_every_writer_reader_depth_and_edge(circuit: Circuit) -> None:
    drawing, writing = drawn(circuit), circuit.writing
    nodes = {(node.kind, node.index): node for node in drawing.nodes}
    assert len(nodes) == len(writing.writers) + len(writing.readers) + 4
    assert len(drawing.links) == len(writing.edges) > 0
    by_layer = sorted(writing.writers, key=lambda head: head.call)
    heights = [nodes["writer", writing.writers.index(head)].y for head in by_layer]
    assert heights == sorted(heights, reverse=True), "layer 0 is at the bottom"
    assert nodes["writer", 0].size > nodes["writer", 1].size, "the area is what a writer removes alone"
    assert nodes["depth", 0].marks == "absent"
    assert nodes["depth", 1].size > nodes["depth", 0].size
    faint = {(link.writer, link.reader) for link in drawing.links if link.marks == "faint"}
    contain_0 = {(edge.writer, edge.reader) for edge in writing.edges if edge.removed.low <= 0 <= edge.removed.high}
    assert faint == contain_0
    assert faint
    assert len(faint) < len(drawing.links)
    assert all(0 <= node.x <= drawing.width and 0 <= node.y <= drawing.height for node in drawing.nodes)


def test_an_edge_that_increases_the_leakage_is_marked_and_in_the_legend(circuit: Circuit, text: str) -> None:
    below = Estimate(np.asarray(-0.2), np.asarray(-0.3), np.asarray(-0.1), circuit.trace.ordinary.prompts)
    edge = replace(circuit.writing.edges[0], removed=below, share=below)
    negative = replace(circuit, writing=replace(circuit.writing, edges=(edge,)))
    (link,) = drawn(negative).links
    assert link.marks == "negative"
    (view,), _ = gather([negative])
    assert "leakage increases" in section(Page.of([view]).html())
    assert "increases the leakage" not in text


def test_an_edge_without_a_share_is_faint(circuit: Circuit) -> None:
    edge = max(circuit.writing.edges, key=lambda edge: float(edge.removed.low))
    nan = replace(edge, share=replace(edge.share, value=np.asarray(math.nan)))
    alone: Writing = replace(circuit.writing, edges=(nan,))
    (link,) = drawn(replace(circuit, writing=alone)).links
    assert link.marks == "faint"
    assert "of what all heads" not in link.text


@pytest.mark.parametrize(("layers", "heads"), [(2, 4), (30, 9), (80, 64)])
def test_a_drawing_is_as_large_as_its_model(layers: int, heads: int) -> None:
    from posleak.reports.circuit_drawing import GAP, LEAST, Grid

    grid = Grid(tuple(map(float, range(layers))), heads, layers)
    assert grid.y(0) > grid.y(layers - 1) > 0
    assert grid.y(0) + grid.row / 2 < grid.height
    assert grid.x(heads - 1, False) < grid.line < grid.x(0, True)
    assert grid.x(0, True) - grid.line > GAP
    assert grid.cell >= LEAST[0]
    assert grid.width <= 360 or heads > 20
    assert [grid.between(depth)[1] for depth in range(layers)] == [grid.y(layer) for layer in range(layers)]


def test_tables_have_the_numbers_of_the_circuit(circuit: Circuit, folder: Path) -> None:
    views, _ = gather([folder])
    found, writing, carrier = tables(views), circuit.writing, circuit.carrier
    assert carrier is not None
    alone = [row for row in found["circuit_writers"] if row["norm"] == "attention"]
    assert [(row["layer"], row["head"], row["value"]) for row in alone] == [
        (head.layer, head.head, head.alone.value) for head in writing.writers if head.alone is not None
    ]
    chosen = {(row["k"], row["heads"], row["norm"], row["draw"]): row for row in found["circuit_removed"]}
    for size in writing.removed:
        assert chosen[size.k, "removed", "attention", None]["high"] == size.leading.removed.high
        assert [chosen[size.k, "random", "even", k]["value"] for k in range(len(size.even.draws))] == [*size.even.draws]
    assert len(found["circuit_attribution"]) == writing.heads
    assert [row["attribution"] for row in found["circuit_attribution"][:3]] == list(writing.attribution.heads[0])
    depths = {(row["depth"], row["direction"]): row for row in found["circuit_carrier"]}
    assert depths[2, None]["value"] == carrier.share.value[2]
    assert depths[2, 1]["low"] == carrier.leading.low[2]
    assert depths[0, 1]["value"] is None or math.isnan(depths[0, 1]["value"])
    assert len(found["circuit_curve"]) == carrier.curve.value.size
    assert len(found["circuit_alignment"]) == carrier.alignment.size
    assert {row["edit"] for row in found["circuit_erasure"]} == {row.edit for row in circuit.erasure}
    assert len(found["circuit_edges"]) == 2 * len(writing.edges)


def test_assets_have_figures_and_tables_of_the_circuit(folder: Path, tmp_path: Path) -> None:
    pl.report(folder, tmp_path / "page.html", assets=tmp_path / "assets")
    names = {path.name for path in (tmp_path / "assets").glob("circuit*")}
    figures = {"removed", "curve", "carrier", "alignment", "erasure", "loss"}
    assert {f"circuit-{name}.{suffix}" for name in figures for suffix in ("png", "svg")} <= names
    for name in ("writers", "removed", "readers", "edges", "attribution", "carrier", "curve", "alignment", "erasure"):
        table = pq.read_table(tmp_path / "assets" / f"circuit_{name}.parquet")
        assert pyarrow.csv.read_csv(tmp_path / "assets" / f"circuit_{name}.csv").num_rows == table.num_rows > 0
    assert (tmp_path / "assets" / "circuit-curve.svg").read_text().count("depth") >= 3


def test_the_circuit_adds_little_to_the_page(path: Path, plain_folder: Path) -> None:
    without = pl.report(plain_folder, plain_folder.parent / "without.html")
    assert 0 < path.stat().st_size - without.stat().st_size < 300_000


# -- in a browser ---------------------------------------------------------------------------------------------------


def marked(function: Any) -> Any:
    for mark in in_browser:
        function = mark(function)
    return function


def colours(page: Any, names: list[str]) -> Any:
    """Return the colours of CSS variables as the browser computes them."""
    return page.evaluate(
        "(names) => names.map((name) => { const e = document.body.appendChild(document.createElement('i'));"
        " e.style.color = `var(--${name})`; return getComputedStyle(e).color; })",
        names,
    )


@marked
def test_the_page_draws_without_errors_and_hostile_texts_are_text(chromium: Any, path: Path) -> None:
    seen = opened(chromium, path)
    assert seen.errors == []
    assert seen.requests == []
    assert seen.page.evaluate("window.pwned") is None
    assert HOSTILE in seen.page.locator("section.circuit .notice").first.inner_text()
    assert seen.page.locator("section.circuit script").count() == 0
    empty = "[...document.querySelectorAll('section.circuit [data-figure]')].filter((e) => !e.data).length"
    assert seen.page.locator("section.circuit [data-figure]").count() == 8
    assert seen.page.evaluate(empty) == 0


@marked
def test_arrow_keys_move_between_nodes_and_show_their_numbers(chromium: Any, path: Path, circuit: Circuit) -> None:
    page = opened(chromium, path).page
    panel, active = page.locator(".circuitpanel"), "document.activeElement.dataset.{}"
    head = circuit.writing.writers[0]
    assert head.alone is not None
    page.locator('.drawing [tabindex="0"]').focus()
    assert page.locator('.drawing [tabindex="0"]').count() == 1
    assert f"Writer L{head.layer}.H{head.head}" in panel.inner_text()
    assert estimate(head.alone, "share") in panel.inner_text()
    on = page.evaluate("[...document.querySelectorAll('.link.on')].map((e) => [e.dataset.writer, e.dataset.reader])")
    assert sorted(on) == sorted([str(e.writer), str(e.reader)] for e in circuit.writing.edges if e.writer == 0)
    page.keyboard.press("ArrowRight")
    assert page.evaluate(active.format("kind")) == "depth"
    page.keyboard.press("End")
    assert "Direction at depth 3" in panel.inner_text()
    assert circuit.carrier is not None
    assert estimate(circuit.carrier.leading[3], "share") in panel.inner_text()
    page.keyboard.press("ArrowDown")
    assert page.evaluate(active.format("index")) == "2"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(active.format("kind")) == "reader"
    reader = circuit.writing.readers[int(page.evaluate(active.format("index")))]
    assert estimate(reader.earlier) in panel.inner_text()
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert f"L{reader.layer}.H{reader.head}" in label
    assert "n = 8 prompts" in label
    page.keyboard.press("ArrowRight")
    assert page.evaluate(active.format("kind")) == "reader", "there is nothing further right"
    stroke = page.evaluate("getComputedStyle(document.activeElement.querySelector('path:not(.back)')).stroke")
    assert [stroke] == colours(page, ["focus"])


@marked
def test_hovering_a_node_shows_it(chromium: Any, path: Path, circuit: Circuit) -> None:
    page = opened(chromium, path).page
    page.locator('.node[data-kind="writer"][data-index="1"]').hover()
    head = circuit.writing.writers[1]
    assert f"L{head.layer}.H{head.head}" in page.locator(".node-name").inner_text()
    title = page.locator('.node[data-kind="writer"][data-index="1"] title').text_content()
    assert head.alone is not None
    assert estimate(head.alone, "share") in title
    assert percent(head.attribution) in title


@marked
def test_the_slider_chooses_the_depth_of_the_curve(chromium: Any, path: Path, circuit: Circuit) -> None:
    page = opened(chromium, path).page
    assert circuit.carrier is not None
    slider = page.locator(".curve-depth")
    for depth in (int(slider.input_value()), int(slider.input_value()) + 1):
        drawn_ = page.evaluate("Array.from(document.querySelector('[data-figure=circuit-curve]').data[1].y)")
        np.testing.assert_allclose(drawn_, circuit.carrier.curve.value[depth], rtol=1e-6)
        ends = page.evaluate(
            "document.querySelector('[data-figure=circuit-curve]').data[1].customdata.map((x) => x[1])"
        )
        np.testing.assert_allclose(ends, circuit.carrier.curve.high[depth], rtol=1e-6)
        slider.focus()
        page.keyboard.press("ArrowRight")


@marked
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_overflows(chromium: Any, path: Path, width: int) -> None:
    page = opened(chromium, path, width=width).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.locator(".drawing").bounding_box()
    assert box["width"] > 250
    assert page.evaluate("document.querySelector('.drawing-box').getBoundingClientRect().right") <= width
    small = page.evaluate(
        "[...document.querySelectorAll('.drawing text')].filter((e) => e.textContent.trim() &&"
        " e.getBoundingClientRect().height < 9).length"
    )
    assert small == 0


@marked
def test_colours_of_the_drawing_are_those_of_the_theme(chromium: Any, path: Path) -> None:
    parts = {".node.writer:not(.open) circle:not(.back)": "mask", ".drawing .heads": "faint",
             ".node.depth .share": "total"}  # fmt: skip
    seen = list[list[str]]()
    for scheme in ("light", "dark"):
        page = opened(chromium, path, scheme=scheme).page
        fills = [
            page.evaluate("(s) => getComputedStyle(document.querySelector(s)).fill", selector) for selector in parts
        ]
        assert fills == colours(page, list(parts.values()))
        seen.append(fills)
    assert all(light != dark for light, dark in zip(*seen, strict=True))


@marked
def test_the_drawing_needs_no_script(chromium: Any, path: Path, circuit: Circuit) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.locator(".drawing .node.writer").count() == len(circuit.writing.writers)
    assert page.locator(".drawing").is_visible()
    assert page.locator(".node-links li").count() == len(circuit.writing.writers)
    context.close()


def test_the_data_of_the_page_are_json(path: Path) -> None:
    content = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.S)
    assert content is not None
    (run,) = json.loads(content[1])["runs"]
    assert run["circuit"]["positions"] == 12
    assert {name for name in run["figures"] if name.startswith("circuit-")} >= {"circuit-removed", "circuit-loss"}
