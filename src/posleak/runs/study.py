"""A study, cell by cell, into run folders that are kept and reused; and its table, which is the result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from posleak.errors import ModelError
from posleak.leakage import Bootstrap, Estimate
from posleak.leakage.summary import Grams
from posleak.models import Subject, load
from posleak.plain import plain
from posleak.studies.balance import Balance
from posleak.studies.cells import Cell, Study

from .folder import write_atomically
from .measure import default_folder, measure
from .run import Run
from .spec import MeasureSpec

TABLE = "study.json"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One cell, measured: its balance, and against the first cell of its model the removed share of each component."""

    cell: Cell
    run: Run
    balance: Balance
    removed: dict[str, Estimate]

    def as_dict(self) -> dict[str, Any]:
        identity = self.run.record["identity"]
        return {
            "label": self.cell.label, "cell": asdict(self.cell), "run": str(self.run.path), "dtype": identity["dtype"],
            "quantisation": identity["quantisation"], "balance": plain(self.balance), "removed": plain(self.removed),
        }  # fmt: skip


def run_study(chosen: Study, root: str | Path = "runs", progress: Say = lambda what: None) -> list[Row]:
    """Measure what is missing, one model in memory at a time, and read the table off the runs."""
    rows: list[Row] = []
    for _, cells in groupby(chosen.cells, key=lambda cell: (cell.model, cell.dtype)):
        rows += _rows(list(_measured(list(cells), Path(root), progress)))
    write_table(Path(root) / f"study-{chosen.name}", chosen, rows)
    return rows


def _measured(cells: list[Cell], root: Path, progress: Say) -> Iterator[tuple[Cell, Run]]:
    progress(f"loading {cells[0].model}")
    subject = _load(cells[0], progress)
    for cell in cells:
        asked: dict[str, Any] = asdict(cell)
        for name in ("model", "dtype", "inputs"):
            del asked[name]
        spec = MeasureSpec(inputs=cell.inputs, **asked)
        place = root / default_folder(subject, spec).name
        yield cell, measure(subject, cell.inputs, out=place, progress=_said(cell, progress), **asked)


def _said(cell: Cell, progress: Say) -> Callable[[int, int], None]:
    return lambda done, of: progress(f"{cell.label}: {done} of {of} prompts")


def _load(cell: Cell, progress: Say) -> Subject:
    """In float32; where that does not fit, in bfloat16, and the result says so."""
    try:
        return load(cell.model, dtype=cell.dtype, progress=progress)
    except ModelError as error:
        if cell.dtype is not None or "memory" not in error.what:
            raise
        progress(f"{cell.model} does not fit in float32: bfloat16")
        return load(cell.model, dtype="bfloat16", progress=progress)


def _rows(measured: list[tuple[Cell, Run]]) -> Iterator[Row]:
    first_cell, first = measured[0]
    before = _grams(first)
    for cell, run in measured:
        paired = (cell.length, cell.prompts, cell.seed, cell.inputs) == (
            first_cell.length, first_cell.prompts, first_cell.seed, first_cell.inputs,
        )  # fmt: skip
        removed = _removed(_grams(run), before, cell) if paired and run is not first else {}
        windows = run.record["calibration"]["windows"]
        yield Row(cell, run, Balance.of(run.data, windows, cell.seed), removed)


def _grams(run: Run) -> dict[str, Grams]:
    return {"early": Grams.of(run.data, early=True).averaged((0, 1)), "all": Grams.of(run.data).averaged((0, 1))}


def _removed(after: dict[str, Grams], before: dict[str, Grams], cell: Cell) -> dict[str, Estimate]:
    """1 − power after / before, by component and queries, paired on the same prompts."""
    bootstrap, found = Bootstrap.of(cell.prompts, cell.seed), {}
    for queries in ("early", "all"):
        for name, gram in after[queries].own.items():
            ratio = bootstrap.ratio(gram, before[queries].own[name])
            found[f"{name}, {queries}"] = Estimate(1 - ratio.value, 1 - ratio.high, 1 - ratio.low, ratio.n)
    return found


def write_table(folder: Path, chosen: Study, rows: list[Row]) -> None:
    """study.json: the question and every row; runs are named, not copied."""
    value = {"study": chosen.name, "question": chosen.question, "rows": [row.as_dict() for row in rows]}
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(folder / TABLE, lambda path: path.write_text(text + "\n", encoding="utf-8"))
