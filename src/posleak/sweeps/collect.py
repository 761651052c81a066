"""All finished cells of a place as one tidy table: one row per number, with the cell that it is of.

Cells of different seeds read different prompts of the same kind, and cells of different edits read the same ones. So
numbers of cells that differ in their seed alone are pooled, and powers under an edit are also given as their ratio to
the same cell without edits, prompt by prompt.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from posleak.arrays import Array
from posleak.errors import PosleakError, RunError
from posleak.leakage import Estimate
from posleak.leakage.contrast import PowerKey, contrasts
from posleak.leakage.number import SHARE_UNIT, LabelledEstimate

from .balance import BalanceTable, balance_table
from .cells import Cell, Resources
from .numbers import PRODUCTS, read_numbers, read_products
from .state import CELL_FILE, ERROR_FILE, FAILED, FINISHED, NUMBERS_FILE, Failed, Finished, read_sealed
from .storage import CELLS_FOLDER, Storage
from .work import error_line

TABLE, PAGE = "collected.parquet", "collected.html"

MOST_NUMBERS = 1 << 32
"""Bytes of a cell's numbers or products."""

KNOBS = ("model", "kind", "edits", "inputs", "bos", "length", "prompts", "origin", "density", "dtype")
"""What cells can differ in, besides their seed and, of a series of checkpoints, the step."""

CELL_COLUMNS = ("cell", *KNOBS, "series", "step", "seed", "device", "architecture", "weights_sha256", "run")
NUMBER = ("layer", "queries", "quantity", "component", "value", "low", "high", "n", "unit")
RATIO = "ratio"
"""Power over the power of the same cell without edits."""

Products = dict[PowerKey, Array]

NO_EDITS = "none"
MEND = "start the sweep again to mend it"


@dataclass(frozen=True)
class Omitted:
    """A cell that is in the place and has no rows in the table, and why."""

    name: str
    label: str
    why: str


@dataclass(frozen=True, repr=False)
class Collected:
    """What a place holds. `table`: one row per number; docs/sweeps.md has the columns.

    failed, left_out, omitted   cells without numbers: that failed, that would change nothing, that cannot be used
    """

    root: str
    finished: list[Finished]
    table: pd.DataFrame
    failed: list[Failed]
    left_out: list[Failed]
    omitted: list[Omitted]

    def __repr__(self) -> str:
        return f"Collected({len(self.finished)} cells, {len(self.table)} numbers; {self.root})"

    @cached_property
    def pooled(self) -> pd.DataFrame:
        """Numbers of the whole model, over seeds: cells that differ in nothing else are one row."""
        whole = self.table[self.table["layer"].isna()]
        apart = [*KNOBS, "series", "step", "queries", "quantity", "component", "unit"]
        rows = [
            {**dict(zip(apart, key, strict=True)), "seeds": len(group), **_pool(group)}
            for key, group in whole.groupby(apart, sort=False, dropna=False)
        ]
        return pd.DataFrame(rows, columns=[*apart, "seeds", "value", "low", "high", "n"])

    @cached_property
    def balance(self) -> BalanceTable:
        """Mask, drift and sink in every finished cell, read from the runs."""
        left_out = {error.cell.label: error.what for error in self.left_out}
        return balance_table(Storage(self.root), self.finished, left_out)

    def varied(self) -> dict[str, list[Any]]:
        """Knobs in which the cells differ, with their values in order."""
        cells = [knobs(record) for record in self.finished]
        found = {name: list(dict.fromkeys(cell[name] for cell in cells)) for name in KNOBS}
        return {name: _ordered(values) for name, values in found.items() if len(values) > 1}

    def parquet(self) -> bytes:
        """The table as a Parquet file."""
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pandas(self.table, preserve_index=False), buffer, compression="zstd")
        return buffer.getvalue()

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of `posleak collect --json`, but for the files' places (docs/json.md)."""
        gone = [{"cell": e.cell.details, "why": e.what} for e in self.failed]
        without = [{"cell": e.cell.details, "why": e.what} for e in self.left_out]
        return {
            "root": self.root, "finished": len(self.finished), "rows": len(self.table), "varied": self.varied(),
            "failed": gone, "left_out": without, "omitted": [{"cell": o.label, "why": o.why} for o in self.omitted],
        }  # fmt: skip


def collected(root: str) -> Collected:
    """Everything that a place holds, each cell once. A damaged cell is left out and named."""
    storage = Storage(root)
    finished, failed, omitted = list[Finished](), list[Failed](), list[Omitted]()
    tables, products = dict[str, pd.DataFrame](), dict[str, Products]()
    names = storage.cell_folders()
    if not names:
        raise RunError(
            "there is no sweep here", where=root, expected="a folder with cells/, as `posleak sweep` makes it",
            remedy="give the folder of a sweep (its --out)",
        )  # fmt: skip
    records = dict[str, Finished]()
    now = storage.snapshot([f"{CELLS_FOLDER}/{name}/{file}" for name in names for file in (CELL_FILE, ERROR_FILE)])
    for name in names:
        with _omitting(name, omitted):
            record = read_sealed(now, FINISHED, f"{CELLS_FOLDER}/{name}/{CELL_FILE}")
            if record is None:
                failed += _failure(now, name, omitted)
            else:
                records[name] = record
    files = [f"{CELLS_FOLDER}/{name}/{record.place}" for name, record in records.items()]
    now = storage.snapshot([place + file for place in files for file in (NUMBERS_FILE, PRODUCTS)])
    for name, record in records.items():
        with _omitting(name, omitted):
            if any(other[:12] == record.id[:12] for other in tables):
                raise RunError("its record is that of another cell", remedy="delete this folder")
            tables[record.id] = read_numbers(*_file(now, name, record, NUMBERS_FILE))
            products[record.id] = read_products(*_file(now, name, record, PRODUCTS), record.cell.spec.prompts)
            finished.append(record)
    finished, older = _newest(sorted(finished, key=lambda record: _place(record.cell)))
    omitted += older
    table = _tidy(storage, finished, tables, products)
    return Collected(
        root, finished, table, [e for e in failed if not e.left_out], [e for e in failed if e.left_out], omitted
    )


def knobs(record: Finished) -> dict[str, Any]:
    """What a finished cell was, by the names of the columns; the dtype is the one that it had."""
    cell, spec = record.cell, record.cell.spec
    return {
        "model": cell.name, "kind": cell.kind, "edits": " + ".join(spec.edit_texts) or NO_EDITS, "inputs": spec.inputs,
        "bos": str(spec.bos), "length": spec.length, "prompts": spec.prompts, "origin": spec.origin,
        "density": spec.density, "dtype": record.model.dtype,
    }  # fmt: skip


def _tidy(
    storage: Storage, finished: Sequence[Finished], tables: dict[str, pd.DataFrame],
    products: dict[str, Products],
) -> pd.DataFrame:  # fmt: skip
    """Every number of every cell, with the cell's columns before it."""
    columns = [*CELL_COLUMNS, *NUMBER]
    if not finished:
        return pd.DataFrame(columns=columns)
    first = {_without_edits(record): record for record in finished if not record.cell.spec.edits}
    found = dict[str, pd.DataFrame]()
    for record in finished:
        own = tables[record.id]
        base = first.get(_without_edits(record))
        if base is not None and record.cell.spec.edits and base.inputs.same_tokens(record.inputs):
            rows = _ratios(products[record.id], products[base.id], record.cell.spec.prompts)
            own = pd.concat([own, pd.DataFrame(list(rows), columns=own.columns).astype(own.dtypes)])
        found[record.id[:12]] = own
    about = pd.DataFrame([_about(storage, record) for record in finished], columns=CELL_COLUMNS)
    numbers = pd.concat(found, names=["cell", None]).reset_index(level=0)
    table = numbers.merge(about, how="left", on="cell", validate="many_to_one")[columns]
    return table.astype({"step": "Int64", "layer": "Int64", "series": "string"})


def _about(storage: Storage, record: Finished) -> dict[str, Any]:
    """The columns of a cell."""
    return {
        "cell": record.id[:12], **knobs(record), "series": record.cell.series, "step": record.cell.step,
        "seed": record.cell.spec.seed, "device": record.model.device, "architecture": record.model.architecture,
        "weights_sha256": record.model.weights_sha256, "run": storage.path(f"{CELLS_FOLDER}/{record.cell.folder}"),
    }  # fmt: skip


def _ratios(after: Products, before: Products, prompts: int) -> Iterator[dict[str, Any]]:
    for (queries, component), contrast in contrasts(after, before, prompts).items():
        labels = {"queries": queries, "quantity": RATIO, "component": component, "unit": SHARE_UNIT}
        yield LabelledEstimate(contrast.ratio.estimate, labels).as_row(NUMBER)


def _without_edits(record: Finished) -> tuple[str, Cell]:
    """Return what identifies the measurement without its edits."""
    spec = replace(record.cell.spec, edits=())
    cell = replace(record.cell, spec=spec, resources=Resources(), title=None, series=None, step=None)
    return record.model.weights_sha256, cell


def _newest(finished: Sequence[Finished]) -> tuple[list[Finished], list[Omitted]]:
    """One of each: what was measured again, with other versions or of a changed model, counts once, the newest."""
    found: dict[Any, Finished] = {}
    for record in sorted(finished, key=lambda each: each.finished):
        found[replace(record.cell, resources=Resources())] = record
    kept = {record.id for record in found.values()}
    why = "it was measured again later, with other versions of posleak, torch or transformers"
    older = [Omitted(r.cell.folder, r.cell.details, why) for r in finished if r.id not in kept]
    return [record for record in finished if record.id in kept], older


@contextmanager
def _omitting(name: str, omitted: list[Omitted]) -> Iterator[None]:
    """Name a cell that cannot be read; the others are read."""
    try:
        yield
    except (PosleakError, MemoryError) as error:
        omitted.append(Omitted(name, name, error_line(error)))


def _failure(storage: Storage, name: str, omitted: list[Omitted]) -> list[Failed]:
    """The error of a cell that has one; without, it is not finished, and named."""
    error = read_sealed(storage, FAILED, f"{CELLS_FOLDER}/{name}/{ERROR_FILE}")
    if error is None:
        omitted.append(Omitted(name, name, "it is not finished; start the sweep again: it goes on"))
    return [] if error is None else [error]


def _file(storage: Storage, folder: str, record: Finished, name: str) -> tuple[bytes, str]:
    """Return a cell's file, if it is what was written, and its path."""
    place = f"{CELLS_FOLDER}/{folder}/{record.place}{name}"
    found, facts = storage.read(place, MOST_NUMBERS), record.files.get(name)
    if found is None or facts is None or hashlib.sha256(found).hexdigest() != facts.sha256:
        raise RunError(f"{name} is gone, damaged or was changed", where=storage.path(place), remedy=MEND)
    return found, storage.path(place)


def _place(cell: Cell) -> Any:
    """Where a cell stands in a table: checkpoints in the order of training, then edits, lengths and seeds."""
    step = -1 if cell.step is None else cell.step
    spec = cell.spec
    return cell.kind, cell.series or cell.name, step, cell.name, spec.inputs, spec.edit_texts, spec.length, spec.seed


def estimate_of(row: Mapping[Any, Any]) -> Estimate:
    """A row's number with its interval."""
    return LabelledEstimate.from_row(row).estimate


def _pool(group: pd.DataFrame) -> dict[str, Any]:
    parts = [estimate_of(row) for row in group[["value", "low", "high", "n"]].to_dict("records")]
    mean = parts[0] if len(parts) == 1 else Estimate.average(parts)
    return LabelledEstimate(mean).as_row()


def _ordered(values: list[Any]) -> list[Any]:
    """Numbers by size; texts as they came, without edits first."""
    if all(isinstance(value, int) for value in values):
        return sorted(values)
    return sorted(values, key=lambda value: value != NO_EDITS)
