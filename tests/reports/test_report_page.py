"""The page in a browser: it says what the run says, reacts to mouse and keyboard, and makes no request."""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import posleak as pl
from posleak.analyses.trace.trace import SOURCES, Trace
from posleak.runs.run import Run
from posleak.show.numbers import number, percent
from support.report_tiny import NAME, browser, hostile_run, measured, opened, traced

pytestmark = [
    pytest.mark.page,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium: `make test` installs it where it may"),
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def hostile_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile_run(tmp_path_factory.mktemp("page") / "run")


@pytest.fixture(scope="module")
def page(hostile_folder: Path) -> Path:
    return pl.report(hostile_folder, hostile_folder.parent / "page.html")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traced(tmp_path_factory.mktemp("traced") / "run")


@pytest.fixture(scope="module")
def traced_page(trace: Path) -> Path:
    return pl.report(trace, trace.parent / "page.html")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("several")
    runs = [
        measured(place / "llama"), measured(place / "edited", edits=("bos=zero",)),
        measured(place / "gemma", "gemma3_text", layers=3, heads=5),
    ]  # fmt: skip
    return pl.report(runs, place / "page.html")


def embedded(path: Path) -> Any:
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"), re.S)[1])  # type: ignore[index]


def curve(page: Any) -> Any:
    """What the components plot draws: y of every trace."""
    return page.evaluate("document.querySelector('article:not([hidden]) .head-parts').data.map((t) => Array.from(t.y))")


def test_no_request_no_error_and_small(chromium: Any, page: Path) -> None:
    seen = opened(chromium, page)
    seen.page.wait_for_timeout(300)
    assert seen.requests == []
    assert seen.errors == []
    assert page.stat().st_size < 10e6


def said(shares: Any, names: tuple[str, ...]) -> list[str]:
    """How a page says these shares; those that are not defined are left out."""
    return [
        f"{name} {percent(share['value'])} ({percent(share['low'])} … {percent(share['high'])})"
        for name in names
        if (share := shares[name])["value"] is not None
    ]


def spoken(page: Any) -> list[str]:
    """The sentences of the run that is shown."""
    return [" ".join(text.split()) for text in page.locator("article:visible .sentence").all_inner_texts()]


def test_the_first_sentence_is_the_runs(chromium: Any, several: Path) -> None:
    run = several.parent / "llama"
    record, numbers = json.loads((run / "run.json").read_text()), Run.load(run).as_dict()
    seen = opened(chromium, several)
    (sentence,) = spoken(seen.page)
    assert sentence.startswith(record["identity"]["name"])
    for queries in ("early", "all"):
        assert all(text in sentence for text in said(numbers[queries]["share"], ("mask", "drift", "sink")))
    facts = seen.page.locator("article:visible .facts").inner_text()
    assert f"n = {record['spec']['prompts']} prompts of {record['spec']['length']} tokens" in facts
    assert record["inputs"]["first_token"] in facts


def test_with_a_trace_the_first_sentence_is_about_where_it_comes_from(
    chromium: Any, traced_page: Path, trace: Path
) -> None:
    seen = opened(chromium, traced_page)
    assert seen.errors == []
    assert seen.requests == []
    loaded = Trace.load(trace)
    assert loaded is not None
    first, second = spoken(seen.page)
    assert first.startswith(f"{NAME} gets absolute position")
    assert len(said(loaded.as_dict()["all"]["share"], loaded.sources)) == 3
    assert all(text in first for text in said(loaded.as_dict()["all"]["share"], loaded.sources))
    assert all(text in second for text in said(loaded.ordinary.as_dict()["all"]["share"], ("mask", "drift", "sink")))
    shown = seen.page.locator(".balance").first.inner_text()
    assert all(name in shown for name in loaded.sources)
    assert "state" not in shown
    answer = seen.page.locator("section.answer").inner_text().lower()
    assert all(check in answer for check in loaded.checks)
    lines, swatches = (
        [
            seen.page.locator(f"{kind}{name}").first.evaluate(f"(e) => getComputedStyle(e).{colour}")
            for name in SOURCES[1:-1]
        ]
        for kind, colour in ((".part.u-", "borderBottomColor"), (".swatch.", "backgroundColor"))
    )
    assert lines == swatches
    assert len(set(lines)) == 3


def test_both_splits_are_drawn_over_one_axis_and_switch_queries(chromium: Any, traced_page: Path, trace: Path) -> None:
    loaded = Trace.load(trace)
    assert loaded is not None
    page = opened(chromium, traced_page).page
    drawn = (
        "[...document.querySelector('[data-base=both]').data].filter((t) => t.name)"
        ".map((t) => [t.name, t.yaxis || 'y', Array.from(t.y)])"
    )
    for queries in ("all", "early"):
        page.locator(f'[data-switch="depth"] input[value="{queries}"]').check()
        found = {(name, axis): y for name, axis, y in page.evaluate(drawn)}
        for name in ("total", *loaded.sources, "left"):
            np.testing.assert_allclose(found[name, "y"], loaded.layers[queries].power[name].value)
        for name in ("total", "mask", "drift", "sink"):
            np.testing.assert_allclose(found[name, "y2"], loaded.ordinary.summary.layers[queries].power[name].value)
    page.locator("details", has_text="Table: all queries, by layer").locator("summary").click()
    table = page.locator("details", has_text="Table: all queries, by layer").locator("tbody tr")
    assert table.count() == 3
    assert number(loaded.layers["all"].power["earlier"].value[2]) in table.nth(2).inner_text()


@pytest.mark.parametrize("figure", ["ladder", "sink-profile"])
def test_a_map_shows_its_values_on_hover_and_in_a_table(
    chromium: Any, traced_page: Path, trace: Path, figure: str
) -> None:
    loaded = Trace.load(trace)
    assert loaded is not None
    assert loaded.ladder is not None
    value = loaded.ladder.left.value[1, 2] if figure == "ladder" else loaded.ordinary.summary.layer_profile.value[1, 2]
    page = opened(chromium, traced_page).page
    spot = page.locator(f'[data-figure="{figure}"]')
    spot.scroll_into_view_if_needed()
    x, y = page.evaluate(
        "(name) => { const spot = document.querySelector(`[data-figure=${name}]`), box = spot.getBoundingClientRect(),"
        " { xaxis, yaxis } = spot._fullLayout;"
        " return [box.x + xaxis._offset + xaxis.l2p(2), box.y + yaxis._offset + yaxis.l2p(1)]; }",
        figure,
    )
    page.mouse.move(x, y)
    page.wait_for_function("(name) => document.querySelector(`[data-figure=${name}] .hovertext`)", arg=figure)
    text = spot.locator(".hoverlayer").text_content()
    assert text.startswith("borrowed in 0, layer 2" if figure == "ladder" else "layer 1, position 2")
    assert float(re.search(r": (\S+) \(", text)[1].replace("−", "-")) == pytest.approx(value, rel=0.01)  # type: ignore[index]
    table = page.locator("figure", has=spot).locator("xpath=following-sibling::details[1]")
    table.locator("summary").click()
    assert number(value) in table.locator("tbody").inner_text()


def test_the_map_of_heads_shows_sources_too(chromium: Any, traced_page: Path, trace: Path) -> None:
    loaded = Trace.load(trace)
    assert loaded is not None
    page = opened(chromium, traced_page, "#head=L2.H1&component=earlier").page
    assert page.locator("select.component").input_value() == "earlier"
    title = page.locator('.grid button[data-layer="2"][data-head="1"]').get_attribute("title")
    value = float(re.search(r": (\S+) \(", title)[1].replace("−", "-"))  # type: ignore[index]
    assert value == pytest.approx(loaded.heads["all"].power["earlier"].value[2, 1], rel=0.06)
    assert "origin" in page.locator(".headrow").inner_text()
    options = page.locator("select.component option").all_inner_texts()
    assert {"earlier", "here", "origin", "left"} < set(options)
    assert "state" not in options
    assert opened(chromium, traced_page, "#component=sink&quantity=share").errors == []


def test_every_claim_has_its_verdict(chromium: Any, page: Path, hostile_folder: Path) -> None:
    seen = opened(chromium, page).page
    assert seen.locator(".verdicts li").count() == len(
        json.loads((hostile_folder / "claims.json").read_text())["claims"]
    )


def test_a_head_is_chosen_by_click_and_by_keyboard(chromium: Any, page: Path) -> None:
    seen = opened(chromium, page, "#head=L0.H0&component=drift").page
    assert seen.locator(".headname").inner_text() == "Layer 0, head 0"
    before = curve(seen)
    seen.locator('.grid button[data-layer="1"][data-head="2"]').click()
    assert "head=L1.H2&component=drift" in seen.url
    clicked = curve(seen)
    assert clicked != before
    seen.keyboard.press("ArrowDown")
    assert "head=L2.H2" in seen.url
    assert curve(seen) != clicked
    seen.keyboard.press("ArrowLeft")
    assert seen.locator(".headname").inner_text() == "Layer 2, head 1"
    assert seen.evaluate("document.activeElement.dataset.head") == "1"
    assert seen.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_the_address_leads_back(chromium: Any, page: Path) -> None:
    first = opened(chromium, page).page
    first.locator('.grid button[data-layer="2"][data-head="1"]').click()
    first.locator("select.component").select_option("sink")
    first.locator("select.quantity").select_option("share")
    again = opened(chromium, page, "#" + first.url.split("#")[1]).page
    assert again.locator(".headname").inner_text() == "Layer 2, head 1"
    assert again.locator("select.component").input_value() == "sink"
    assert again.locator("select.quantity").input_value() == "share"
    assert curve(again) == curve(first)


@pytest.mark.parametrize("fragment", ["#head=L99.H99&component=nonsense", "#head=%3Cscript%3E", "#method", "#run=9"])
def test_a_wrong_address_is_harmless(chromium: Any, page: Path, fragment: str) -> None:
    seen = opened(chromium, page, fragment)
    assert seen.errors == []
    assert seen.page.locator('.grid button[aria-selected="true"]').count() == 1


def test_the_slider_moves_the_portrait(chromium: Any, page: Path) -> None:
    seen = opened(chromium, page).page
    points = "Array.from(document.querySelector('.portrait').data[0].x)"
    before = seen.evaluate(points)
    seen.locator("input.depth").focus()
    seen.keyboard.press("ArrowRight")
    after = seen.evaluate(points)
    assert len(before) == len(after) > 10
    assert before != after
    assert seen.locator(".slider output").inner_text().startswith("1 ")


def test_the_table_sorts_and_chooses(chromium: Any, page: Path) -> None:
    seen = opened(chromium, page).page
    values = "[...document.querySelectorAll('.sortable tbody tr')].map((r) => Number(r.children[2].dataset.value))"
    seen.locator(".sortable th button", has_text="mask").first.click()
    assert seen.evaluate(values) == sorted(seen.evaluate(values), reverse=True)
    seen.locator(".sortable th button", has_text="mask").first.click()
    assert seen.evaluate(values) == sorted(seen.evaluate(values))
    row = seen.locator(".sortable tbody tr").last
    row.click()
    layer, head = row.get_attribute("data-head").split(".")
    assert f"head=L{layer}.H{head}" in seen.url


def test_hostile_names_and_tokens_are_text(chromium: Any, page: Path) -> None:
    seen = opened(chromium, page)
    assert seen.page.evaluate("window.pwned") is None
    assert seen.page.locator(".sentence b").first.inner_text() == NAME
    token = "<script>window.pwned="
    ticks = seen.page.locator('[data-figure="fingerprint"] .ytick text').all_text_contents()
    assert any(text.startswith("<script>") for text in ticks)
    assert seen.page.locator("main script").count() == 0
    seen.page.locator(".portrait").scroll_into_view_if_needed()
    seen.page.evaluate("Plotly.Fx.hover(document.querySelector('.portrait'), [{curveNumber: 0, pointNumber: 0}])")
    assert token in seen.page.locator(".portrait .hoverlayer").text_content()
    assert seen.page.evaluate("window.pwned") is None


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_overflows(chromium: Any, page: Path, several: Path, traced_page: Path, width: int) -> None:
    for path in (page, several, traced_page):
        seen = opened(chromium, path, width=width).page
        assert seen.evaluate("document.documentElement.scrollWidth") <= width
        wide = seen.evaluate(
            "[...document.querySelectorAll('main *')].filter((e) => !e.closest('.scroll, svg, .js-plotly-plot') &&"
            " e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.tagName + '.' + e.className)"
        )
        assert wide == []


def luminance(colour: str) -> float:
    r, g, b = (int(x) / 255 for x in re.findall(r"\d+", colour)[:3])
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (r, g, b)]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(chromium: Any, page: Path, scheme: str) -> None:
    seen = opened(chromium, page, scheme=scheme).page
    colour = "(selector) => getComputedStyle(document.querySelector(selector)).{}"
    background = seen.evaluate(colour.format("backgroundColor"), "body")
    assert (luminance(background) < 0.1) == (scheme == "dark")
    for selector in ("body", ".lede", ".facts", "figcaption", ".verdicts .what span", ".plain th", ".top nav a"):
        assert contrast(seen.evaluate(colour.format("color"), selector), background) >= 4.5, selector
    for mark in ("supported", "contradicted", "inconclusive"):
        assert contrast(seen.evaluate(colour.format("color"), f".mark.v-{mark}"), background) >= 4.5, mark
    text = seen.evaluate("getComputedStyle(document.querySelector('[data-base] .xtick text')).fill")
    assert contrast(text, background) >= 4.5
    seen.locator("#theme").click()
    assert luminance(seen.evaluate(colour.format("backgroundColor"), "body")) > 0.5 or scheme == "light"


def test_every_number_is_the_parquets(chromium: Any, page: Path, hostile_folder: Path) -> None:
    heads = embedded(page)["runs"][0]["heads"]
    layers, count = heads["shape"]
    numbers = np.frombuffer(base64.b64decode(heads["numbers"]), dtype="<f8").reshape(-1, layers, count, 3)
    columns = [tuple(column) for column in heads["columns"]]
    rows = pq.read_table(hostile_folder / "heads.parquet").to_pylist()
    rows = [row for row in rows if row["norm"] != "even"]
    assert len(rows) == sum(column[2] not in SOURCES for column in columns) * layers * count
    for row in rows:
        at = columns.index((row["queries"], row["quantity"], row["component"]))
        expected = [row["value"], row["low"], row["high"]]
        np.testing.assert_array_equal(numbers[at, row["layer"], row["head"]], expected)
    # And the cells show them: the title of a cell of the map is its number.
    seen = opened(chromium, page, "#component=mask").page
    for row in rows:
        if (row["queries"], row["quantity"], row["component"]) == ("all", "power", "mask"):
            shown = seen.locator(f'.grid button[data-layer="{row["layer"]}"][data-head="{row["head"]}"]').get_attribute(
                "title"
            )
            value = float(re.search(r": (\S+) \(", shown)[1].replace("−", "-"))  # type: ignore[index]
            assert value == pytest.approx(row["value"], rel=0.06)


def test_curves_and_depth_are_the_runs(page: Path, hostile_folder: Path) -> None:
    data, stored = embedded(page)["runs"][0], Run.load(hostile_folder)
    lines = [trace for trace in data["figures"]["both-all"]["data"] if "name" in trace and trace.get("yaxis") == "y2"]
    assert {trace["name"] for trace in lines} == {"total", "mask", "drift", "sink"}
    for trace in lines:
        np.testing.assert_array_equal(trace["y"], stored.summary.layers["all"].power[trace["name"]].value)
    layers, heads, queries = (stored.data.sizes[axis] for axis in ("layer", "head", "query"))
    mean = np.frombuffer(base64.b64decode(data["curves"]["mean"]["mask"]), dtype="<f4").reshape(
        layers, heads, 3, queries
    )
    expected = (
        stored.data["mask"].where(stored.data["pairs"].any("offset")).mean("prompt").transpose("layer", "head", "query")
    )
    np.testing.assert_allclose(mean[:, :, 0], expected.values, rtol=1e-5)
    power = np.frombuffer(base64.b64decode(data["curves"]["power"]["drift"]), dtype="<f4").reshape(mean.shape)[:, :, 0]
    of_heads = stored.summary.heads["all"].power["drift"].value
    np.testing.assert_allclose(np.nanmean(power, axis=-1), of_heads, rtol=1e-4, atol=1e-6)


def test_logits_of_the_head_panel_are_the_runs(page: Path, hostile_folder: Path) -> None:
    data, stored = embedded(page)["runs"][0], Run.load(hostile_folder).data
    shape = stored.sizes["layer"], stored.sizes["head"], 3, stored.sizes["offset"]
    late, early = (
        np.frombuffer(base64.b64decode(data["curves"][name]), dtype="<f4").reshape(shape)[:, :, 0]
        for name in ("late", "early")
    )
    np.testing.assert_allclose(late, stored["logit"].mean("prompt").values, rtol=1e-5)
    s = (stored["drift"] + stored["renormalisation"] + stored["logit"]).where(stored["query"] < 32).mean("query")
    expected = s.mean("prompt").transpose("layer", "head", "offset").values
    np.testing.assert_allclose(early, expected, rtol=1e-4, atol=1e-5)


def test_several_runs_have_a_balance_and_a_chooser(chromium: Any, several: Path) -> None:
    seen = opened(chromium, several)
    assert seen.errors == []
    assert seen.requests == []
    page = seen.page
    assert page.locator(".compared tbody tr").count() == 2 * (3 + 2)
    assert page.locator(".compared tr.difference").count() == 4
    assert page.locator('.compared [data-figure="overlay-drift"] .scatterlayer .trace').count() >= 3
    page.locator("#run").select_option("2")
    assert "run=2" in page.url
    visible = page.locator("article:visible .sentence b").first.inner_text()
    assert visible.startswith("tiny-gemma3_text")
    assert page.locator("article:visible .grid button").count() == 3 * 5
    page.locator("article:visible select.component").select_option("sink_attention")
    assert "⊘" in page.locator("article:visible .grid").inner_text()


def test_what_is_absent_says_so(chromium: Any, several: Path) -> None:
    page = opened(chromium, several).page
    notes = " ".join(page.locator("article:visible .absent-note:visible").all_inner_texts())
    assert "No claims" in notes
    assert "no analysis of position 0" in notes
    assert "posleak trace tiny-llama" in notes
    assert "No edit was tested" in notes
