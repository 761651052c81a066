"""All finished cells of a sweep: one tidy table with a row per number, and the balance table with a row per cell.

Cells that differ only in their seed have different prompts of the same kind: their numbers are pooled. Cells that
differ only in their edits have the same prompts: powers under an edit are also given as their ratio to the cell without
edits, paired by prompt. In the leading norm both are weighted by the attention of the cell without edits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pandas as pd

from posleak.arrays import Array
from posleak.errors import PosleakError, RunError, error_line
from posleak.files import sha256_of
from posleak.leakage import Estimate
from posleak.leakage.sampled import SHARE_UNIT, LabelledEstimate
from posleak.leakage.summary import EVEN, PowerKey, contrasts, model_products
from posleak.runs.balance import Balance
from posleak.runs.folder import HEADS_FILE, RECORD_FILE, RESULTS_FILE
from posleak.runs.run import Run

from .cells import Cell, Resources
from .numbers import NUMBERS_FILE, PRODUCTS_FILE, SCHEMA, read_numbers, read_products
from .state import CELL_FILE, ERROR_FILE, FAILED, FINISHED, RECORD_FILES, Failed, Finished, read_sealed
from .storage import CELLS_FOLDER, Storage

TABLE_FILE, PAGE_FILE, BALANCE_FILE = "collected.parquet", "collected.html", "balance.json"

MAX_NUMBERS = 1 << 32
"""Bytes of a cell's numbers or products."""

KNOBS = ("model", "kind", "edits", "inputs", "bos", "length", "prompts", "origin", "density", "donor", "dtype")
"""Settings in which cells can differ, except the seed and the step of a checkpoint."""

CELL_COLUMNS = ("cell", *KNOBS, "series", "step", "seed", "device", "architecture", "weights_sha256", "run")
RATIO = "ratio"
"""Power divided by the power of the same cell without edits."""

NO_EDITS = "none"

Products = dict[PowerKey, Array]


@dataclass(frozen=True)
class Omitted:
    """A cell of which rows are missing, and why. `label`: its description, or its folder if it cannot be read."""

    label: str
    why: str


@dataclass(frozen=True, repr=False)
class Collected:
    """The cells of a sweep. `table` has one row per number (docs/sweeps.md).

    failed, left_out, omitted   cells without rows: failed, without effect, unreadable or outdated
    notes                       cells without some of their rows
    """

    root: str
    finished: list[Finished]
    table: pd.DataFrame
    failed: list[Failed]
    left_out: list[Failed]
    omitted: list[Omitted]
    notes: list[Omitted] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"Collected({len(self.finished)} cells, {len(self.table)} numbers; {self.root})"

    @cached_property
    def pooled(self) -> pd.DataFrame:
        """Numbers of the whole model, pooled over seeds."""
        whole = self.table[self.table["layer"].isna()]
        key = [*KNOBS, "series", "step", "queries", "norm", "quantity", "component", "unit"]
        rows = [
            {**dict(zip(key, values, strict=True)), "seeds": len(group), **_pool(group)}
            for values, group in whole.groupby(key, sort=False, dropna=False)
        ]
        return pd.DataFrame(rows, columns=[*key, "seeds", "value", "low", "high", "n"])

    @cached_property
    def balance(self) -> BalanceTable:
        """Mask, drift and sink in every finished cell, read from the runs."""
        left_out = {error.cell.label: error.what for error in self.left_out}
        return balance_table(Storage(self.root), self.finished, left_out)

    def varied(self) -> dict[str, list[Any]]:
        """Return the knobs in which the cells differ, with their values in order."""
        cells = [settings(record) for record in self.finished]
        return varied_values(cells, KNOBS)

    def parquet(self) -> bytes:
        """Return the table as a Parquet file."""
        content: bytes = self.table.to_parquet(index=False, compression="zstd")
        return content

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `posleak collect --json`, except the paths of the files (docs/json.md)."""
        failed, left_out = (
            [{"cell": error.cell.details, "why": error.what} for error in errors]
            for errors in (self.failed, self.left_out)
        )
        omitted, notes = (
            [{"cell": each.label, "why": each.why} for each in cells] for cells in (self.omitted, self.notes)
        )
        return {
            "root": self.root, "finished": len(self.finished), "rows": len(self.table), "varied": self.varied(),
            "failed": failed, "left_out": left_out, "omitted": omitted, "notes": notes,
        }  # fmt: skip


def collected(root: str) -> Collected:
    """Read all cells of a sweep, each once. Cells that cannot be read are omitted, with the reason."""
    storage, omitted = Storage(root), list[Omitted]()
    folders = storage.cell_folders()
    if not folders:
        raise RunError(
            "not the folder of a sweep", where=root, expected="a folder with cells/, as `posleak sweep` writes it",
            remedy="pass the folder of a sweep (its --out)",
        )  # fmt: skip
    records, failed = dict[str, Finished](), list[Failed]()
    now = storage.snapshot(f"{CELLS_FOLDER}/{folder}/{name}" for folder in folders for name in RECORD_FILES)
    for folder in folders:
        with _omitting(folder, omitted):
            if (record := read_sealed(now, FINISHED, f"{CELLS_FOLDER}/{folder}/{CELL_FILE}")) is not None:
                records[folder] = record
            elif (error := read_sealed(now, FAILED, f"{CELLS_FOLDER}/{folder}/{ERROR_FILE}")) is not None:
                failed.append(error)
            else:
                omitted.append(Omitted(folder, "it is not finished; run the sweep again to resume it"))
    finished, tables, products = list[Finished](), dict[str, pd.DataFrame](), dict[str, Products]()
    places = [f"{CELLS_FOLDER}/{folder}/{record.place}" for folder, record in records.items()]
    now = storage.snapshot(place + name for place in places for name in (NUMBERS_FILE, PRODUCTS_FILE))
    for folder, record in records.items():
        with _omitting(folder, omitted):
            if record.id in tables:
                raise RunError("its record belongs to another cell", remedy="delete this folder")
            tables[record.id] = read_numbers(*_file(now, folder, record, NUMBERS_FILE))
            products[record.id] = read_products(*_file(now, folder, record, PRODUCTS_FILE), record.cell.spec.prompts)
            finished.append(record)
    finished, older = _newest(finished)
    omitted += older
    notes = _add_ratios(storage, finished, tables, products)
    return Collected(
        root, finished, _tidy(storage, finished, tables), [error for error in failed if not error.left_out],
        [error for error in failed if error.left_out], omitted, notes,
    )  # fmt: skip


def _file(storage: Storage, folder: str, record: Finished, name: str) -> tuple[bytes, str]:
    """Return the content and the path of a cell's file, if it is unchanged."""
    place = f"{CELLS_FOLDER}/{folder}/{record.place}{name}"
    content, facts = storage.read(place, MAX_NUMBERS), record.files.get(name)
    if content is None or facts is None or hashlib.sha256(content).hexdigest() != facts.sha256:
        raise _damaged(name, storage.path(place))
    return content, storage.path(place)


def _damaged(name: str, path: str) -> RunError:
    what, remedy = f"{name} is missing, damaged or was changed", "run the sweep again to measure the cell again"
    return RunError(what, where=path, remedy=remedy)


@contextmanager
def _omitting(folder: str, omitted: list[Omitted]) -> Iterator[None]:
    """Turn an error into an omitted cell."""
    try:
        yield
    except (PosleakError, MemoryError) as error:
        omitted.append(Omitted(folder, error_line(error)))


def _newest(records: Sequence[Finished]) -> tuple[list[Finished], list[Omitted]]:
    """Return the records in the order of the table, of cells that were measured again only the newest."""
    newest = {replace(each.cell, resources=Resources()): each for each in sorted(records, key=lambda r: r.finished)}
    kept = {record.id for record in newest.values()}
    why = "it was measured again later, with other versions of posleak, torch or transformers"
    older = [Omitted(record.cell.details, why) for record in records if record.id not in kept]

    def order(record: Finished) -> Any:
        """Sort checkpoints by training step, then by edits, lengths and seeds."""
        cell, spec = record.cell, record.cell.spec
        model = cell.series or cell.name, -1 if cell.step is None else cell.step, cell.name
        return cell.kind, *model, spec.inputs, spec.edit_texts, spec.length, spec.origin, cell.donor, spec.seed

    return sorted((record for record in records if record.id in kept), key=order), older


# -- the table ---------------------------------------------------------------------------------------------------------


def settings(record: Finished) -> dict[str, Any]:
    """Return the fields of a finished cell as the table has them; the dtype is the one that it was measured in."""
    cell, spec = record.cell, record.cell.spec
    edits = " + ".join(spec.edit_texts) or NO_EDITS
    return {**cell.as_dict(), "model": cell.name, "edits": edits, "bos": str(spec.bos), "dtype": record.model.dtype}


def _tidy(storage: Storage, finished: Sequence[Finished], tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return every number of every cell, with the cell's columns in front."""
    columns = [*CELL_COLUMNS, *SCHEMA.names]
    if not finished:
        return pd.DataFrame(columns=columns)
    cells = pd.DataFrame([_cell_columns(storage, record) for record in finished])
    numbers = {record.id[:12]: tables[record.id] for record in finished}
    table = pd.concat(numbers, names=["cell", None]).reset_index(level=0)
    table = table.merge(cells, how="left", on="cell", validate="many_to_one")[columns]
    return table.astype({"step": "Int64", "layer": "Int64", "series": "string"})


def _add_ratios(
    storage: Storage, finished: Sequence[Finished], tables: dict[str, pd.DataFrame], products: Mapping[str, Products]
) -> list[Omitted]:
    """Add the ratios to the cell without edits to the tables of edited cells.

    Return the cells that have evenly weighted ratios only, because arrays of one of the two cells cannot be read.
    """
    baselines = {_without_edits(record): record for record in finished if not record.cell.spec.edits}
    weights, notes = dict[str, Run](), list[Omitted]()
    for record in finished:
        baseline = baselines.get(_without_edits(record))
        if baseline is None or not record.cell.spec.edits or not baseline.inputs.same_tokens(record.inputs):
            continue
        after = {key: sums for key, sums in products[record.id].items() if key.norm == EVEN}
        try:
            if baseline.id not in weights:
                run = load_run(storage, baseline)
                weights[baseline.id] = replace(run, data=run.data[["weight"]])  # the other arrays are not kept
            after = model_products(load_run(storage, record).weighted_by(weights[baseline.id])) | after
        except (PosleakError, MemoryError) as error:
            notes.append(Omitted(record.cell.details, f"its ratios are only evenly weighted: {error_line(error)}"))
        own, rows = tables[record.id], list[dict[str, Any]]()
        for key, contrast in contrasts(after, products[baseline.id], record.cell.spec.prompts).items():
            labels = {**key._asdict(), "quantity": RATIO, "unit": SHARE_UNIT}
            rows.append(LabelledEstimate(contrast.ratio.estimate, labels).as_row(SCHEMA.names))
        tables[record.id] = pd.concat([own, pd.DataFrame(rows, columns=own.columns).astype(own.dtypes)])
    return notes


def load_run(storage: Storage, record: Finished) -> Run:
    """Load the run of a finished cell after checking that its files are unchanged."""
    names, path = (RECORD_FILE, RESULTS_FILE, HEADS_FILE), record.cell.path
    with storage.cell_files(path, record.place, names) as folder:
        for name in names:
            facts, file = record.files.get(name), folder / name
            if facts is None or not file.is_file() or sha256_of(file) != facts.sha256:
                raise _damaged(name, storage.path(f"{path}/{record.place}{name}"))
        return Run.load(folder)


def _without_edits(record: Finished) -> tuple[str, Cell]:
    """Return what identifies a measurement except its edits."""
    spec = replace(record.cell.spec, edits=())
    cell = replace(record.cell, spec=spec, resources=Resources(), title=None, series=None, step=None)
    return record.model.weights_sha256, cell


def _cell_columns(storage: Storage, record: Finished) -> dict[str, Any]:
    model = {name: getattr(record.model, name) for name in ("device", "architecture", "weights_sha256")}
    values = {**settings(record), **model, "cell": record.id[:12], "run": storage.path(record.cell.path)}
    return {name: values[name] for name in CELL_COLUMNS}


def estimate_of(row: Mapping[Any, Any]) -> Estimate:
    """Return the estimate in a row of the table."""
    return LabelledEstimate.from_row(row).estimate


def _pool(group: pd.DataFrame) -> dict[str, Any]:
    """Return the mean of the same number over seeds, as a row."""
    parts = [estimate_of(row) for row in group[["value", "low", "high", "n"]].to_dict("records")]
    return LabelledEstimate(parts[0] if len(parts) == 1 else Estimate.average(parts)).as_row()


def varied_values(settings: Sequence[Mapping[str, Any]], names: Iterable[str]) -> dict[str, list[Any]]:
    """Return the settings with more than one value, and their values.

    Numbers are in increasing order; of other values `none` comes first. None, a setting that is missing, comes last.
    """
    varied = dict[str, list[Any]]()
    for name in names:
        values = list(dict.fromkeys(each[name] for each in settings))
        numeric = all(isinstance(value, int) for value in values if value is not None)
        if len(values) > 1:
            varied[name] = sorted(values, key=lambda value: (value is None, value if numeric else value != NO_EDITS))
    return varied


# -- the balance table -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BalanceRow:
    """One finished cell.

    run       its folder;  dtype, quantisation: those in which it was measured
    removed   `component, queries` -> 1 − power / power in the first cell of the same model, paired by prompt and
              weighted by the attention of that cell; `component, queries, even` -> the same, evenly weighted. Empty in
              the first cell, and where prompts or sampled positions differ
    """

    cell: Cell
    run: str
    dtype: str
    quantisation: str | None
    balance: Balance
    removed: dict[str, Estimate]

    def as_dict(self) -> dict[str, Any]:
        cell = self.cell.as_dict()
        shown = ("model", "edits", "length", "prompts", "seed", "inputs", "bos", "dtype")
        return {"label": self.cell.label, **vars(self), "cell": {name: cell[name] for name in shown}}


@dataclass(frozen=True)
class BalanceTable:
    """The balance of every finished cell. `left_out`: label -> reason, for cells whose edits have no effect."""

    question: str | None
    rows: list[BalanceRow]
    left_out: dict[str, str]


def balance_table(
    storage: Storage, finished: Iterable[Finished], left_out: Mapping[str, str], question: str | None = None
) -> BalanceTable:
    """Return the balance table of finished cells; the first cell of each model is the baseline of the others."""
    baselines, rows = dict[Any, Run](), list[BalanceRow]()
    for record in finished:
        cell, run = record.cell, load_run(storage, record)
        baseline = baselines.setdefault((cell.model, cell.dtype), run)
        identity, path = run.record.identity, storage.path(cell.path)
        removed = dict[str, Estimate]()
        one, other = run.record, baseline.record
        paired = run.prompts == baseline.prompts and one.plan == other.plan and one.inputs.same_tokens(other.inputs)
        if run is not baseline and paired:
            after = model_products(run.weighted_by(baseline))
            for key, contrast in contrasts(after, model_products(baseline.products), run.prompts).items():
                labels = [key.component, key.queries, *([EVEN] if key.norm == EVEN else [])]
                removed[", ".join(labels)] = contrast.removed
        rows.append(BalanceRow(cell, path, identity.dtype, identity.quantisation, Balance.of(run), removed))
    return BalanceTable(question, rows, dict(left_out))
