"""Pages with real results are current: they show the stored numbers, and some of these are measured again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import posleak as pl
from posleak.axes import PARTS
from support.families import subject
from tools import claims_docs, gallery, question
from tools.markdown import read_part

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PERCENT = re.compile(r"(−?\d+(?:\.\d+)?)%")


def stored_numbers() -> dict[str, Any]:
    """Return docs/gallery/numbers.json."""
    numbers: dict[str, Any] = json.loads((DOCS / "gallery" / gallery.NUMBERS).read_text(encoding="utf-8"))
    return numbers


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def percents(line: str) -> list[float]:
    """Return the percentages of a line."""
    return [float(each.replace("−", "-")) for each in PERCENT.findall(line)]


def test_every_page_of_the_gallery_is_there_and_the_index_is_current() -> None:
    assert set(stored_numbers()) == {entry.name for entry in gallery.ENTRIES}
    assert {path.stem for path in (DOCS / "gallery").glob("*.html")} == set(stored_numbers())
    assert text(DOCS / "gallery" / gallery.INDEX) == gallery.index(stored_numbers())


def test_pages_that_show_its_numbers_are_current() -> None:
    assert text(DOCS / claims_docs.PAGE) == claims_docs.page(stored_numbers())
    pictures = text(DOCS / question.PAGE)
    assert pictures == question.page(pictures, stored_numbers()[question.MODEL][question.MODEL])


@pytest.mark.parametrize("name", [entry.name for entry in gallery.ENTRIES if "135m" in entry.name])
def test_the_page_shows_the_stored_numbers(name: str) -> None:
    """The first sentence of the page, and the output that README shows."""
    page = text(DOCS / "gallery" / f"{name}.html")
    shares = {
        source: gallery.read_estimate(stored_numbers()[name][name]["shares"][source])
        for source in ("earlier", "here", "origin")
    }
    expected = [round(100 * float(end)) for share in shares.values() for end in (share.value, share.low, share.high)]
    sentence = page.partition('class="sentence"')[2].partition("</p>")[0]
    assert percents(re.sub("<.*?>", "", sentence))[:9] == expected
    lines = read_part(text(ROOT / "README.md"), "trace").splitlines()
    (shown,) = (line for line in lines if line.startswith("all queries"))
    assert percents(shown) == expected


@pytest.mark.filterwarnings("ignore:the origin of 4 tokens:posleak.errors.PosleakWarning")
def test_the_first_measurement_of_the_start_page_prints_what_it_shows() -> None:
    shown, now = read_part(text(DOCS / question.START), "first"), question.output(question.first())
    assert re.sub(PERCENT, "", shown) == re.sub(PERCENT, "", now)
    assert percents(shown) == pytest.approx(percents(now), abs=1.01), "rounding differs between machines"


@pytest.mark.filterwarnings("ignore::posleak.errors.PosleakWarning")
@pytest.mark.parametrize("model", ["zoo-text-rope", "zoo-backcopy-learned"])
def test_the_stored_numbers_are_those_of_a_measurement(model: str) -> None:
    stored = stored_numbers()["zoo"][model]
    run = pl.measure(model, length=128, prompts=16)
    whole = run.summary.model["all"]
    for row, now in [
        (stored["leakage"], whole.power["total"]),
        *((stored["shares"][name], whole.share[name]) for name in ("mask", "drift", "sink")),
    ]:
        before = gallery.read_estimate(row)
        for end in ("value", "low", "high"):
            assert float(getattr(before, end)) == pytest.approx(
                float(getattr(now, end)), rel=1e-3, abs=1e-4, nan_ok=True
            )


def test_figures_of_the_question_are_drawn_from_a_trace() -> None:
    trace = pl.trace(subject(), length=64, prompts=4)
    figures = question.figures(trace)
    assert set(figures) == {path.stem.removeprefix("question-") for path in (DOCS / "images").glob("question-*.png")}
    visible = question.borrowed_mask()
    assert list((visible > 0).sum(1)) == [1] + [question.MASK_TOKENS] * (question.MASK_TOKENS - 1), (
        "all but the first see equally many"
    )
    assert np.array_equal(
        (visible == 1)[:, question.MASK_TOKENS :], np.tril(np.ones((question.MASK_TOKENS, question.MASK_TOKENS))) > 0
    )


@pytest.mark.filterwarnings("ignore::posleak.errors.PosleakWarning")
def test_a_page_of_the_gallery_is_made_of_small_models(tmp_path: Path) -> None:
    entry = gallery.Entry("two", ("zoo-backcopy-rope", "zoo-backcopy-learned"), "Two.", length=64)
    gallery.generate(entry, tmp_path / "gallery", tmp_path / "runs")
    numbers = json.loads(text(tmp_path / "gallery" / gallery.NUMBERS))["two"]
    assert set(numbers["zoo-backcopy-rope"]["shares"]) == {*PARTS, *gallery.SHOWN}
    assert set(numbers["zoo-backcopy-learned"]["shares"]) == {"mask", "drift", "sink"}, "trace is not defined there"
    assert (tmp_path / "gallery" / "two.html").stat().st_size < 10**7
