"""The page of a sweep: curves over training steps or any other knob, heat maps over two, and a table of all cells.

What is drawn is chosen on the page; every number and interval on it is made here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.offline
from markupsafe import Markup

from posleak._version import __version__
from posleak.analyses.trace.trace import SOURCES
from posleak.axes import PARTS
from posleak.leakage import Estimate
from posleak.show import numbers
from posleak.show.colours import style_sheet
from posleak.signatures import checked
from posleak.sweeps.collect import KNOBS, PAGE_FILE, RATIO, TABLE_FILE, Collected, collected, estimate_of
from posleak.sweeps.storage import Storage

from .page import environment, script_json, static

MOST_ROWS = 400
"""Rows of the page's table; the others are in collected.parquet."""

STEP = "step"
ON_PAGE = (*KNOBS, STEP)

WORDS = {
    "kind": "kind of run", "edits": "edits", "inputs": "inputs", "bos": "BOS", "length": "tokens per prompt",
    "prompts": "prompts", "origin": "width of the origin", "density": "density", "dtype": "dtype", "model": "model",
    STEP: "training step",
}  # fmt: skip
"""What knobs are called."""

READ = {name: f"read as {name}" for name in PARTS} | {"residual": "drift and sink together", "scaling": "scaling"}
FROM = {
    "here": "from the layer's own mask",
    "earlier": "from masks of earlier layers",
    "origin": "from position 0",
}

OTHERS = {
    "attention": "attention to position 0",
    "stabilisation": "stabilisation by the sink",
    "slope": "slope of the residual",
}


@dataclass(frozen=True)
class PlottedQuantity:
    """Something that can be drawn: `key` is queries/quantity/component."""

    key: str
    title: str
    unit: str

    @property
    def axis(self) -> str:
        return self.title if self.unit in ("1", "share") else f"{self.title}, {self.unit}"


@dataclass(frozen=True)
class CollectedPoint:
    """Cells that differ in nothing but their seed: `knobs` by name, `numbers` by the quantity's key."""

    knobs: dict[str, Any]
    seeds: int
    numbers: dict[str, Estimate]


@dataclass(frozen=True)
class CollectedPage:
    """Everything on the page."""

    found: Collected

    @cached_property
    def points(self) -> list[CollectedPoint]:
        """In the order of the cells; a checkpoint's model is its series, and its step is a knob."""
        pooled = self.found.pooled
        made = list[CollectedPoint]()
        for _, group in pooled.groupby([*KNOBS, "series", "step"], sort=False, dropna=False):
            rows = group.to_dict("records")
            first = rows[0]
            knobs = {name: first[name] for name in KNOBS}
            if not pd.isna(first["series"]):
                knobs["model"] = first["series"]
            knobs[STEP] = None if pd.isna(first["step"]) else int(first["step"])
            found = {_key(row): estimate_of(row) for row in rows}
            made.append(CollectedPoint(knobs, int(max(row["seeds"] for row in rows)), found))
        return made

    @cached_property
    def varied(self) -> dict[str, list[Any]]:
        """Knobs in which points differ."""
        found = {name: list(dict.fromkeys(point.knobs[name] for point in self.points)) for name in ON_PAGE}
        return {name: _ordered(values) for name, values in found.items() if len(values) > 1}

    @cached_property
    def quantities(self) -> list[PlottedQuantity]:
        """What any of the cells has, the most asked for first."""
        rows = self.found.pooled[["queries", "quantity", "component", "unit"]].drop_duplicates().to_dict("records")
        there = [PlottedQuantity(_key(row), _title(row), str(row["unit"])) for row in rows]
        return sorted(there, key=lambda quantity: _rank(quantity.key))

    @property
    def shown(self) -> list[PlottedQuantity]:
        """Columns of the table: what has a number somewhere, without early queries and metrics of others."""
        shares = [f"all/share/{name}" for name in (*PARTS, *SOURCES)]
        ratios = [f"all/{RATIO}/total", f"all/{RATIO}/residual"]
        wanted = ["all/power/total", *shares, "reference/attention/position 0", *ratios]
        by_key = {quantity.key: quantity for quantity in self.quantities}
        return [by_key[key] for key in wanted if key in by_key]

    @property
    def most_rows(self) -> int:
        return MOST_ROWS

    def data(self) -> dict[str, Any]:
        """What the page's script reads. Numbers: value, low, high, n; null where there is none."""
        return {
            "knobs": {name: {"title": WORDS[name], "values": values} for name, values in self.varied.items()},
            "quantities": [{"key": q.key, "title": q.title, "axis": q.axis, "unit": q.unit} for q in self.quantities],
            "points": [
                {"knobs": {name: point.knobs[name] for name in self.varied}, "seeds": point.seeds,
                 "numbers": {key: _plain(number) for key, number in point.numbers.items()}}
                for point in self.points
            ],
        }  # fmt: skip

    def cell(self, point: CollectedPoint, quantity: PlottedQuantity) -> tuple[str, str]:
        """A number of the table: value, and interval."""
        found = point.numbers.get(quantity.key)
        if found is None:
            return "", ""
        unit = "share" if "/share/" in quantity.key else "times" if f"/{RATIO}/" in quantity.key else ""
        return numbers.shown(float(found.value), unit), numbers.interval(found, unit)

    def html(self) -> str:
        return environment().get_template("collected.html.j2").render(
            page=self, found=self.found, words=WORDS, version=__version__, data=script_json(self.data()),
            style=Markup(style_sheet()) + static("page.css"), table=TABLE_FILE,
            script=static("common.js") + static("collected.js"), plotly=Markup(plotly.offline.get_plotlyjs()),
        )  # fmt: skip


@dataclass(frozen=True)
class Gathered:
    """What `collect` found, and where it wrote it."""

    found: Collected
    table: str
    page: str

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of `posleak collect --json` (docs/json.md)."""
        return {**self.found.as_dict(), "table": self.table, "page": self.page}


def gather_sweep(folder: str, page: str | None = None) -> Gathered:
    """The table and the page of a sweep, written beside its cells; or the page elsewhere."""
    found = collected(folder)
    storage = Storage(folder)
    storage.write(TABLE_FILE, found.parquet())
    text = CollectedPage(found).html().encode()
    if page is None:
        storage.write(PAGE_FILE, text)
        return Gathered(found, storage.path(TABLE_FILE), storage.path(PAGE_FILE))
    target = Path(page)
    Storage(str(target.parent)).write(target.name, text)
    return Gathered(found, storage.path(TABLE_FILE), str(target))


@checked
def collect(folder: str | Path, page: str | Path | None = None) -> pd.DataFrame:
    """All runs of a sweep as one tidy table, which is also written as collected.parquet, with a page of comparisons.

    One row per number: the cell's columns (model, edits, length, seed, step …), then layer (missing for the whole
    model), queries, quantity, component, value, low, high, n, unit. docs/sweeps.md has queries with pandas and DuckDB.

    folder      the sweep's `out`: a folder, or an address such as s3://bucket/sweep
    page        where the page goes; None: collected.html beside the cells
    """
    return gather_sweep(str(folder), None if page is None else str(page)).found.table


def _key(row: Mapping[Any, Any]) -> str:
    return f"{row['queries']}/{row['quantity']}/{row['component']}"


def _plain(found: Estimate) -> list[float | int | None]:
    ends = [float(found.value), float(found.low), float(found.high)]
    return [*(None if math.isnan(each) else each for each in ends), found.n]


def _title(row: Mapping[Any, Any]) -> str:
    """A quantity in words."""
    component, quantity = row["component"], row["quantity"]
    of = ", early queries" if row["queries"] == "early" else ""
    if quantity == "power":
        return ("leakage" if component == "total" else f"power, {component.replace('_', ' ')}") + of
    if quantity == "share":
        return f"share {(READ | FROM).get(component, component)}{of}"
    if quantity == RATIO:
        return f"{'leakage' if component == 'total' else component.replace('_', ' ')} over that without edits{of}"
    if quantity == "loss":
        return "next-token loss" if component == "all" else f"next-token loss, {component} of the prompt"
    return OTHERS.get(quantity, str(component).replace("_", " ")) + of


def _rank(key: str) -> tuple[bool, int, str]:
    """All queries first; leakage, shares, attention, ratios, other powers, the rest."""
    queries, quantity, component = key.split("/")
    order = ["share", "attention", RATIO, "loss", "power", "stabilisation", "slope"]
    place = -1 if (quantity, component) == ("power", "total") else order.index(quantity) if quantity in order else 9
    inner = [*PARTS, *SOURCES, "residual"]
    return queries == "early", place, f"{inner.index(component) if component in inner else 99:02d}{component}"


def _ordered(values: list[Any]) -> list[Any]:
    there = [value for value in values if value is not None]
    kept = sorted(there) if all(isinstance(value, int) for value in there) else there
    return [*kept, *([None] if None in values else [])]
