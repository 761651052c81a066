"""The page of a sweep: curves over training steps or any other setting, maps over two settings, a table of all cells.

The reader chooses on the page what is drawn; every number and interval is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from posleak.analyses.trace.trace import SOURCES
from posleak.axes import PARTS
from posleak.leakage import Estimate
from posleak.leakage.sampled import SHARE_UNIT
from posleak.leakage.summary import EVEN, LEADING, Decomposition
from posleak.show import numbers
from posleak.signatures import checked
from posleak.sweeps.collect import KNOBS, PAGE_FILE, RATIO, TABLE_FILE, Collected, collected, estimate_of, varied_values
from posleak.sweeps.storage import Storage
from posleak.typed import plain

from .page import rendered

MOST_ROWS = 400
"""Rows of the table on the page; collected.parquet has all of them."""

STEP = "step"
SETTINGS = {
    "kind": "kind of run", "edits": "edits", "inputs": "inputs", "bos": "BOS", "length": "tokens per prompt",
    "prompts": "prompts", "origin": "tokens of the origin", "density": "density", "donor": "donor", "dtype": "dtype",
    "model": "model", STEP: "training step",
}  # fmt: skip
"""Titles of the settings in which cells can differ."""

SHARES = {
    **{name: f"read as {name}" for name in PARTS}, "residual": "drift and sink together",
    "here": "from the layer's own mask", "earlier": "from masks of earlier layers", "origin": "from position 0",
    "state": "from a young recurrent state", "left": "left without a source",
}  # fmt: skip
RANKS = ["share", "attention", RATIO, "loss", "power", "order", "stabilisation", "slope"]
COMPONENT_ORDER = [*PARTS, *SOURCES, "residual"]


@dataclass(frozen=True)
class PlottedQuantity:
    """A quantity that can be drawn. `norm`: None if it has none."""

    queries: str
    quantity: str
    component: str
    unit: str
    norm: str | None = None

    @property
    def key(self) -> str:
        """The name of the quantity in the page's data, in both norms."""
        return f"{self.queries}/{self.quantity}/{self.component}"

    @property
    def axis(self) -> str:
        return self.title if self.unit in ("1", "share") else f"{self.title}, {self.unit}"

    @property
    def title(self) -> str:
        component = self.component.replace("_", " ")
        leakage = "leakage" if component == "total" else component
        titles = {
            "power": "leakage" if component == "total" else f"power, {component}",
            "share": f"share {SHARES.get(self.component, self.component)}",
            RATIO: f"{leakage}, ratio to the run without edits",
            "loss": "next-token loss" if component == "all" else f"next-token loss, {component} of the prompt",
            "stabilisation": "stabilisation by the sink", "slope": "slope of the residual",
            "attention": "attention to position 0", "order": "difference between the two orders of removing masks",
        }  # fmt: skip
        return titles.get(self.quantity, component) + (", early queries" if self.queries == "early" else "")

    @property
    def rank(self) -> tuple[bool, int, int, str]:
        """All queries before early ones; leakage, shares, attention, ratios, other powers, the rest."""
        name, component = self.quantity, self.component
        place = -1 if (name, component) == ("power", "total") else RANKS.index(name) if name in RANKS else 9
        inner = COMPONENT_ORDER.index(component) if component in COMPONENT_ORDER else 99
        return self.queries == "early", place, inner, component

    def text(self, point: CollectedPoint, norm: str | None = None) -> tuple[str, str]:
        """Return a point's value and interval as text, on request in another norm; empty if there is none."""
        own = self if norm is None or self.norm is None else replace(self, norm=norm)
        estimate = point.numbers.get(own)
        if estimate is None:
            return "", ""
        unit = {"share": "share", RATIO: "times"}.get(self.quantity, "")
        return numbers.shown(float(estimate.value), unit), numbers.interval(estimate, unit)


@dataclass(frozen=True)
class CollectedPoint:
    """Cells that differ only in their seed, pooled: their settings by name, and their numbers."""

    settings: dict[str, Any]
    seeds: int
    numbers: dict[PlottedQuantity, Estimate]

    @property
    def prompts(self) -> int:
        """Number of prompts over all seeds."""
        return next(iter(self.numbers.values())).n

    @property
    def norms_disagree(self) -> bool:
        """Whether the two norms lead to different conclusions about the shares of all queries."""
        shares = [(q, x) for q, x in self.numbers.items() if (q.queries, q.quantity) == ("all", "share")]
        leading, even = ({q.component: x for q, x in shares if q.norm == norm} for norm in (LEADING, EVEN))
        decomposition = Decomposition({}, leading, even=Decomposition({}, even))
        return bool(even) and any(decomposition.disagreement(names) for names in (PARTS, SOURCES))


@dataclass(frozen=True)
class CollectedPage:
    """The page of the collected cells of a sweep."""

    collected: Collected

    @cached_property
    def points(self) -> list[CollectedPoint]:
        """Points in the order of the cells; checkpoints of one series share their model and differ in the step."""
        points = list[CollectedPoint]()
        for _, group in self.collected.pooled.groupby([*KNOBS, "series", STEP], sort=False, dropna=False):
            rows = group.to_dict("records")
            first = rows[0]
            settings = {name: first[name] for name in KNOBS}
            settings["model"] = first["model"] if pd.isna(first["series"]) else first["series"]
            settings[STEP] = None if pd.isna(first[STEP]) else int(first[STEP])
            cells = {_quantity(row): estimate_of(row) for row in rows}
            points.append(CollectedPoint(settings, int(max(row["seeds"] for row in rows)), cells))
        return points

    @cached_property
    def varied(self) -> dict[str, list[Any]]:
        """Settings with more than one value, and their values."""
        return varied_values([point.settings for point in self.points], (*KNOBS, STEP))

    @cached_property
    def quantities(self) -> list[PlottedQuantity]:
        """Quantities that at least one cell has, in the leading norm, the most important first."""
        every = (q if q.norm is None else replace(q, norm=LEADING) for point in self.points for q in point.numbers)
        return sorted(dict.fromkeys(every), key=lambda quantity: quantity.rank)

    @property
    def columns(self) -> list[PlottedQuantity]:
        """Quantities of the table; the share of the state only if it is not 0% everywhere."""
        shares = [f"all/share/{name}" for name in (*PARTS, *SOURCES)]
        state = PlottedQuantity("all", "share", "state", SHARE_UNIT, LEADING)
        states = [point.numbers[state].value for point in self.points if state in point.numbers]
        if all(abs(float(value)) < 0.005 for value in states):
            shares.remove("all/share/state")
        wanted = ["all/power/total", *shares, "reference/attention/position 0", f"all/{RATIO}/total",
                  f"all/{RATIO}/residual"]  # fmt: skip
        return sorted((q for q in self.quantities if q.key in wanted), key=lambda quantity: wanted.index(quantity.key))

    def data(self) -> dict[str, Any]:
        """Return what the page's script reads; a number is [value, low, high, n], null where it is not defined.

        `even` has the numbers that differ in this norm.
        """
        points = [
            {"knobs": {name: point.settings[name] for name in self.varied}, "seeds": point.seeds,
             "numbers": _by_key(point, LEADING, None), EVEN: _by_key(point, EVEN)}
            for point in self.points
        ]  # fmt: skip
        data: dict[str, Any] = plain({
            "knobs": {name: {"title": SETTINGS[name], "values": values} for name, values in self.varied.items()},
            "quantities": [{"key": q.key, "title": q.title, "axis": q.axis, "unit": q.unit} for q in self.quantities],
            "points": points,
        })  # fmt: skip
        return data

    def html(self) -> str:
        """Return the page."""
        return rendered(
            "collected.html.j2", self.data(), "collected.js", page=self, collected=self.collected, settings=SETTINGS,
            table=TABLE_FILE, most_rows=MOST_ROWS, even=EVEN,
        )  # fmt: skip


def _quantity(row: Mapping[Any, Any]) -> PlottedQuantity:
    """Return the quantity of a row of the table."""
    queries, quantity, component, unit = (str(row[name]) for name in ("queries", "quantity", "component", "unit"))
    return PlottedQuantity(queries, quantity, component, unit, None if pd.isna(row["norm"]) else str(row["norm"]))


def _by_key(point: CollectedPoint, *norms: str | None) -> dict[str, list[Any]]:
    return {q.key: [x.value, x.low, x.high, x.n] for q, x in point.numbers.items() if q.norm in norms}


@dataclass(frozen=True)
class Gathered:
    """The collected cells of a sweep, and the paths of their table and page."""

    collected: Collected
    table: str
    page: str

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `posleak collect --json` (docs/json.md)."""
        return {**self.collected.as_dict(), "table": self.table, "page": self.page}


def gather_sweep(folder: str, page: str | None = None) -> Gathered:
    """Write the table of a sweep into its folder, and the page into its folder or to the path `page`."""
    cells, storage = collected(folder), Storage(folder)
    storage.write(TABLE_FILE, cells.parquet())
    place, name = (storage, PAGE_FILE) if page is None else (Storage(str(Path(page).parent)), Path(page).name)
    place.write(name, CollectedPage(cells).html().encode())
    return Gathered(cells, storage.path(TABLE_FILE), storage.path(PAGE_FILE) if page is None else str(Path(page)))


@checked
def collect(folder: str | Path, page: str | Path | None = None) -> pd.DataFrame:
    """Return all runs of a sweep as one tidy table; also write it as collected.parquet, with a page of comparisons.

    One row per number: the cell's columns (model, edits, length, seed, step …), then layer (missing for the whole
    model), queries, norm (`attention`, `even`, or missing), quantity, component, value, low, high, n, unit.
    docs/sweeps.md has queries with pandas and DuckDB.

    folder      the sweep's `out`: a folder, or an address such as s3://bucket/sweep
    page        path of the page; None: collected.html in the sweep's folder
    """
    return gather_sweep(str(folder), None if page is None else str(page)).collected.table
