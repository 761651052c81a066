"""The numbers of one finished cell as files beside its run, small enough to be read by the thousand.

numbers.parquet   one row per number: the whole model's and every layer's powers and shares, with intervals and units
products.npz      products of prompts of the whole model, by which two cells that read the same prompts are compared
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from posleak.analyses.trace.trace import SOURCES, Trace
from posleak.arrays import Array, read_npz
from posleak.files import translate_read_errors, write_atomically
from posleak.leakage import Estimate, Jackknife
from posleak.leakage.power import pairs
from posleak.leakage.summary import Products, Shares
from posleak.runs.balance import Balance
from posleak.runs.loss import UNIT
from posleak.runs.run import Run

from .state import NUMBERS_FILE

PRODUCTS = "products.npz"
ANEW = "delete the cell's cell.json and start the sweep again: it is measured anew"
QUERIES = ("all", "early")
NATS, ONE = "nats²", "1"

SCHEMA = pa.schema(
    [
        pa.field("layer", pa.int64()), pa.field("queries", pa.string()), pa.field("quantity", pa.string()),
        pa.field("component", pa.string()), pa.field("value", pa.float64()), pa.field("low", pa.float64()),
        pa.field("high", pa.float64()), pa.field("n", pa.int64()), pa.field("unit", pa.string()),
    ]
)  # fmt: skip
"""Of numbers.parquet. `layer` is null where a number is of the whole model."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """What a cell gave: a run, or a trace, of which `run` is the ordinary pass."""

    run: Run
    trace: Trace | None = None

    def write(self, folder: Path) -> None:
        """Both files, into the cell's folder."""
        table = pa.Table.from_pylist(list(self.rows()), schema=SCHEMA)
        write_atomically(folder / NUMBERS_FILE, lambda path: pq.write_table(table, path, compression="zstd"))
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **self.products())
        write_atomically(folder / PRODUCTS, lambda path: path.write_bytes(buffer.getvalue()))

    def rows(self) -> Iterator[Row]:
        """Every number of the whole model and of its layers."""
        summary, balance = self.run.summary, Balance.of(self.run)
        for queries in QUERIES:
            for layer, numbers in _levels(summary.model[queries], summary.layers[queries], summary.numbers):
                yield from _shares(numbers, layer, queries)
                yield _row(layer, queries, "stabilisation", "mask", numbers.stabilisation, ONE)
        yield _row(None, "reference", "attention", "position 0", balance.sink_attention, ONE)
        for layer, number in enumerate(summary.numbers):
            yield _row(number, "reference", "attention", "position 0", summary.layer_sink_attention[layer], ONE)
        if "all" in balance.slopes:
            yield _row(None, "all", "slope", "residual", balance.slopes["all"], f"{NATS} per depth")
        if self.run.loss is not None:
            for where, estimate in self.run.loss.numbers.items():
                yield _row(None, "sampled", "loss", where, estimate, UNIT)
        if self.trace is not None:
            own = set(summary.model["all"].power)
            for queries in QUERIES:
                found = _levels(self.trace.model[queries], self.trace.layers[queries], summary.numbers)
                for layer, shares in found:
                    yield from _shares(shares, layer, queries, leave_out=own)
        if self.run.metrics is not None:
            for row in self.run.metrics.rows:
                yield _row(row.at, "all", "metric", row.metric.id, row.value, row.metric.unit)

    def products(self) -> dict[str, Array]:
        """Products of prompts of the whole model, by queries and component."""
        found = dict(_whole(self.run.products))
        if self.trace is not None:
            found |= {name: sums for name, sums in _whole(self.trace.products) if name.split("/")[1] in SOURCES}
        return found


def read_products(content: bytes, path: str, prompts: int) -> dict[str, Array]:
    """Read what products.npz holds; anything but products of so many prompts is a RunError that names the path."""
    found = read_npz(io.BytesIO(content), path, ANEW)
    expected = (prompts + len(pairs(prompts)[0]),)
    with translate_read_errors(path, ANEW):
        for name, sums in found.items():
            queries, _, component = name.partition("/")
            if queries not in QUERIES or not component or sums.dtype != np.float64 or sums.shape != expected:
                raise ValueError(f"{name} is {sums.dtype} {sums.shape}, not float64 {expected} of some queries")
    return found


def read_numbers(content: bytes, path: str) -> pd.DataFrame:
    """Read what numbers.parquet holds; any other table is a RunError that names the path."""
    with translate_read_errors(path, ANEW):
        table = pq.read_table(io.BytesIO(content))
        if not table.schema.equals(SCHEMA):
            raise ValueError(f"the columns are {', '.join(table.schema.names)}, not {', '.join(SCHEMA.names)}")
        return table.to_pandas()


def ratios(after: Mapping[str, Array], before: Mapping[str, Array], prompts: int) -> dict[str, Estimate]:
    """Power after / power before, by `queries/component`, paired: both must have read the same prompts."""
    jackknife = Jackknife(prompts)
    return {
        name: jackknife.inner(sums).over(jackknife.inner(before[name])).estimate
        for name, sums in after.items()
        if name in before
    }


def whole_model(run: Run) -> dict[str, Array]:
    """Products of prompts of the whole model, by `queries/component`."""
    return dict(_whole(run.products))


def _whole(products: Mapping[str, Products]) -> Iterator[tuple[str, Array]]:
    for queries in QUERIES:
        for name, sums in products[queries].averaged((0, 1)).own.items():
            yield f"{queries}/{name}", sums


def _levels(model: Any, layers: Any, numbers: tuple[int, ...]) -> Iterator[tuple[int | None, Any]]:
    """(None, the whole model's numbers), then (layer, its own)."""
    yield None, model
    for place, number in enumerate(numbers):
        yield number, _at(layers, place)


def _at(shares: Shares, place: int) -> Shares:
    """One layer's numbers of an object that has those of all layers."""
    found = {
        key: {name: each[place] for name, each in value.items()} if isinstance(value, dict) else value[place]
        for key, value in vars(shares).items()
    }
    return type(shares)(**found)


def _shares(shares: Shares, layer: int | None, queries: str, leave_out: set[str] | None = None) -> Iterator[Row]:
    for quantity, unit, found in (("power", NATS, shares.power), ("share", ONE, shares.share)):
        for name, estimate in found.items():
            if leave_out is None or name not in leave_out:
                yield _row(layer, queries, quantity, name, estimate, unit)


def _row(layer: int | None, queries: str, quantity: str, component: str, found: Estimate, unit: str) -> Row:
    return {
        "layer": layer, "queries": queries, "quantity": quantity, "component": component, "value": float(found.value),
        "low": float(found.low), "high": float(found.high), "n": found.n, "unit": unit,
    }  # fmt: skip
