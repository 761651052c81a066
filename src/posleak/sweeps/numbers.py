"""The results of one finished cell as two files next to its run, small enough to read thousands of them.

numbers.parquet   one row per number: powers and shares of the whole model and of every layer, in both norms, with
                  intervals and units
products.npz      products of prompts of the whole model, for paired contrasts of cells with the same prompts
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
from posleak.leakage import Estimate
from posleak.leakage.power import prompt_pairs
from posleak.leakage.sampled import POWER_UNIT, SHARE_UNIT, LabelledEstimate
from posleak.leakage.summary import NORMS, ORDER, QUERIES, STABILISATION, Decomposition, PowerKey, model_products
from posleak.runs.balance import Balance
from posleak.runs.loss import LOSS_UNIT
from posleak.runs.run import Run

NUMBERS_FILE, PRODUCTS_FILE = "numbers.parquet", "products.npz"
REMEDY = "delete the cell's cell.json and run the sweep again to measure the cell again"

SCHEMA = pa.schema({
    "layer": pa.int64(), "queries": pa.string(), "norm": pa.string(), "quantity": pa.string(), "component": pa.string(),
    "value": pa.float64(), "low": pa.float64(), "high": pa.float64(), "n": pa.int64(), "unit": pa.string(),
})  # fmt: skip
"""Columns of numbers.parquet. `layer` is null for the whole model, `norm` for numbers without one."""

RATIO_COMPONENTS = {STABILISATION: "mask", ORDER: "earlier"}
"""The component that a ratio is about."""


@dataclass(frozen=True)
class CellResults:
    """Results of a cell: a run, or a trace with `run` as its ordinary pass."""

    run: Run
    trace: Trace | None = None

    def write(self, folder: Path) -> None:
        """Write both files into the cell's folder."""
        table = pa.Table.from_pylist(list(self.rows()), schema=SCHEMA)
        write_atomically(folder / NUMBERS_FILE, lambda path: pq.write_table(table, path, compression="zstd"))
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **self.products())
        write_atomically(folder / PRODUCTS_FILE, lambda path: path.write_bytes(buffer.getvalue()))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield every number of the whole model and of its layers."""
        summary, balance = self.run.summary, Balance.of(self.run)
        yield from _rows(summary.model, summary.layers, summary.layer_ids)
        yield _row(None, "reference", "attention", "position 0", balance.sink_attention, SHARE_UNIT)
        for call, layer_id in enumerate(summary.layer_ids):
            yield _row(layer_id, "reference", "attention", "position 0", summary.layer_sink_attention[call], SHARE_UNIT)
        if "all" in balance.slopes:
            yield _row(None, "all", "slope", "residual", balance.slopes["all"], f"{POWER_UNIT} per depth")
        if self.run.loss is not None:
            for where, estimate in self.run.loss.numbers.items():
                yield _row(None, "sampled", "loss", where, estimate, LOSS_UNIT)
        if self.trace is not None:
            by_source = _rows(self.trace.model, self.trace.layers, summary.layer_ids)
            yield from (row for row in by_source if row["component"] not in summary.model["all"].power)
        if self.run.metrics is not None:
            for row in self.run.metrics.rows:
                yield _row(row.at, "all", "metric", row.metric.id, row.value, row.metric.unit)

    def products(self) -> dict[str, Array]:
        """Return products of prompts of the whole model, by `norm/queries/component`."""
        products = model_products(self.run.products)
        if self.trace is not None:
            by_source = model_products(self.trace.products)
            products |= {key: sums for key, sums in by_source.items() if key.component in SOURCES}
        return {"/".join(key): sums for key, sums in products.items()}


def read_products(content: bytes, path: str, prompts: int) -> dict[PowerKey, Array]:
    """Read products.npz; raise RunError, with the path, unless it has products of this number of prompts."""
    arrays, products = read_npz(io.BytesIO(content), path, REMEDY), dict[PowerKey, Array]()
    expected = (prompts + len(prompt_pairs(prompts)[0]),)
    with translate_read_errors(path, REMEDY):
        for name, sums in arrays.items():
            norm, queries, component, *more = [*name.split("/"), "", ""]
            if norm not in NORMS or queries not in QUERIES or not component or any(more):
                raise ValueError(f"{name} is not norm/queries/component")
            if sums.dtype != np.float64 or sums.shape != expected:
                raise ValueError(f"{name} is {sums.dtype} {sums.shape}, not float64 {expected}")
            products[PowerKey(norm, queries, component)] = sums
    return products


def read_numbers(content: bytes, path: str) -> pd.DataFrame:
    """Read numbers.parquet; raise RunError, with the path, if it has other columns."""
    with translate_read_errors(path, REMEDY):
        table = pq.read_table(io.BytesIO(content))
        if not table.schema.equals(SCHEMA):
            raise ValueError(f"the columns are {', '.join(table.schema.names)}, not {', '.join(SCHEMA.names)}")
        return table.to_pandas()


def _rows(
    model: Mapping[str, Decomposition], layers: Mapping[str, Decomposition], layer_ids: tuple[int, ...]
) -> Iterator[dict[str, Any]]:
    """Yield every number of the whole model (layer None) and of its layers, for all and then for early queries."""
    for queries in QUERIES:
        of_layers = [(layer, layers[queries][call]) for call, layer in enumerate(layer_ids)]
        for layer, numbers in [(None, model[queries]), *of_layers]:
            for number in numbers.labelled(layer=layer, queries=queries):
                row = number.as_row(SCHEMA.names)
                yield row | {"component": row["component"] or RATIO_COMPONENTS[row["quantity"]]}


def _row(
    layer: int | None, queries: str, quantity: str, component: str, estimate: Estimate, unit: str
) -> dict[str, Any]:
    labels = {"layer": layer, "queries": queries, "quantity": quantity, "component": component, "unit": unit}
    return LabelledEstimate(estimate, labels).as_row(SCHEMA.names)
