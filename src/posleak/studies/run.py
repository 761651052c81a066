"""A study, cell by cell, into run folders that are kept and reused; and its table, which is the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from posleak.errors import TooLargeError
from posleak.files import write_json
from posleak.leakage import Estimate, Jackknife
from posleak.leakage.summary import Grams
from posleak.models import Subject, load
from posleak.runs import Measurement, Run, parse_bytes
from posleak.runs.watch import Watch

from .balance import Balance
from .cells import Cell, Study

TABLE = "study.json"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One measured cell: its balance, and 1 − power / power in the first cell of its model, for each component."""

    cell: Cell
    run: Run
    balance: Balance
    removed: dict[str, Estimate]

    def as_dict(self) -> dict[str, Any]:
        identity = self.run.record.identity
        return {
            "label": self.cell.label, "cell": self.cell, "run": str(self.run.path), "dtype": identity.dtype,
            "quantisation": identity.quantisation, "balance": self.balance, "removed": self.removed,
        }  # fmt: skip


@dataclass(frozen=True)
class Table:
    """study.json: the question and every row; runs are named, not copied."""

    study: str
    question: str
    rows: list[Row]


def run_study(
    chosen: Study,
    root: str | Path = "runs",
    progress: Say = lambda what: None,
    *,
    max_memory: str | int | None = None,
) -> Table:
    """Measure what is missing, one model in memory at a time, and read the table off the runs.

    `max_memory` is what the process may hold, as in `measure`: what does not fit is refused before it is measured.
    """
    limit = parse_bytes(max_memory)
    rows: list[Row] = []
    for _, cells in groupby(chosen.cells, key=lambda cell: (cell.model, cell.dtype)):
        rows += _rows(list(_measured(list(cells), Path(root), progress, limit)))
    table = Table(chosen.name, chosen.question, rows)
    write_json(Path(root) / f"study-{chosen.name}" / TABLE, table)
    return table


def _measured(cells: list[Cell], root: Path, progress: Say, limit: int | None) -> Iterator[tuple[Cell, Run]]:
    progress(f"loading {cells[0].model}")
    subject = _load(cells[0], progress)
    for cell in cells:
        ready = Measurement.of(subject, cell.spec, max_memory=limit)
        yield cell, ready.run_with_warnings(root / ready.folder_name, watch=_said(cell, progress))


def _said(cell: Cell, progress: Say) -> Watch:
    return lambda reached: progress(f"{cell.label}: {reached.text}")


def _load(cell: Cell, progress: Say) -> Subject:
    """In float32; where that does not fit, in bfloat16, and the result says so."""
    try:
        return load(cell.model, dtype=cell.dtype, progress=progress)
    except TooLargeError:
        if cell.dtype is not None:
            raise
        progress(f"{cell.model} does not fit in float32: loading it in bfloat16")
        return load(cell.model, dtype="bfloat16", progress=progress)


def _rows(measured: list[tuple[Cell, Run]]) -> Iterator[Row]:
    first = measured[0][1]
    before = _grams(first)
    for cell, run in measured:
        paired = run.prompts == first.prompts and run.record.inputs.same_tokens(first.record.inputs)
        removed = _removed(_grams(run), before, cell) if paired and run is not first else {}
        yield Row(cell, run, Balance.of(run), removed)


def _grams(run: Run) -> dict[str, Grams]:
    return {queries: grams.averaged((0, 1)) for queries, grams in run.grams.items()}


def _removed(after: dict[str, Grams], before: dict[str, Grams], cell: Cell) -> dict[str, Estimate]:
    """1 − power after / before, by component and queries, paired on the same prompts."""
    jackknife = Jackknife(cell.prompts)
    return {
        f"{name}, {queries}": 1 - jackknife.inner(gram).over(jackknife.inner(before[queries].own[name])).estimate
        for queries in ("early", "all")
        for name, gram in after[queries].own.items()
    }
