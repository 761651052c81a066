"""A study, cell by cell, into run folders that are kept and reused; and its table, which is the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from posleak.errors import NoEffectError, TooLargeError
from posleak.files import write_json
from posleak.leakage import Estimate, Jackknife
from posleak.leakage.summary import Products
from posleak.models import Subject, load
from posleak.runs import Measurement, Run, parse_bytes

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
    """study.json: the question and every row; runs are named, not copied.

    left_out   cells, by label, whose edits would change nothing in their model or at their length, and why
    """

    study: str
    question: str
    rows: list[Row]
    left_out: dict[str, str]


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
    left_out: dict[str, str] = {}
    for _, cells in groupby(chosen.cells, key=lambda cell: (cell.model, cell.dtype)):
        rows += _rows(list(_measured(list(cells), Path(root), progress, limit, left_out)))
    table = Table(chosen.name, chosen.question, rows, left_out)
    write_json(Path(root) / f"study-{chosen.name}" / TABLE, table)
    return table


def _measured(
    cells: list[Cell], root: Path, progress: Say, limit: int | None, left_out: dict[str, str]
) -> Iterator[tuple[Cell, Run]]:  # fmt: skip
    """The cells of one model; those whose edits would change nothing go to `left_out`."""
    progress(f"loading {cells[0].model}")
    subject = _load(cells[0], progress)
    for cell in cells:
        try:
            ready = Measurement.of(subject, cell.spec, max_memory=limit)
            run = ready.run_with_warnings(root / ready.folder_name, progress=_said(cell, progress))
        except NoEffectError as error:
            left_out[cell.label] = error.what
        else:
            yield cell, run


def _said(cell: Cell, progress: Say) -> Callable[[int, int], None]:
    return lambda done, of: progress(f"{cell.label}: {done} of {of} prompts")


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
    before = _products(first)
    for cell, run in measured:
        paired = run.prompts == first.prompts and run.record.inputs.same_tokens(first.record.inputs)
        removed = _removed(_products(run), before, cell) if paired and run is not first else {}
        yield Row(cell, run, Balance.of(run), removed)


def _products(run: Run) -> dict[str, Products]:
    return {queries: found.averaged((0, 1)) for queries, found in run.products.items()}


def _removed(after: dict[str, Products], before: dict[str, Products], cell: Cell) -> dict[str, Estimate]:
    """1 − power after / before, by component and queries, paired on the same prompts."""
    jackknife = Jackknife(cell.prompts)
    return {
        f"{name}, {queries}": 1 - jackknife.inner(sums).over(jackknife.inner(before[queries].own[name])).estimate
        for queries in ("early", "all")
        for name, sums in after[queries].own.items()
    }
