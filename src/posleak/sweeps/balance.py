"""The balance table of a sweep: mask, drift and sink in every cell, and what each removed relative to a baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from posleak.leakage import Estimate
from posleak.leakage.summary import contrasts, model_products
from posleak.runs.balance import Balance
from posleak.runs.run import Run

from .cells import Cell
from .state import Finished
from .storage import CELLS_FOLDER, Storage

BALANCE_FILE = "balance.json"


@dataclass(frozen=True)
class BalanceRow:
    """One finished cell.

    run       its folder;  dtype, quantisation: those in which it was measured
    removed   `component, queries` -> 1 − power / power in the first cell of the same model, paired by prompt; empty in
              the first cell, and where the prompts differ
    """

    cell: Cell
    run: str
    dtype: str
    quantisation: str | None
    balance: Balance
    removed: dict[str, Estimate]

    def as_dict(self) -> dict[str, Any]:
        spec = self.cell.spec
        cell = {
            "model": self.cell.model, "edits": spec.edit_texts, "length": spec.length, "prompts": spec.prompts,
            "seed": spec.seed, "inputs": spec.inputs, "bos": spec.bos, "dtype": self.cell.dtype,
        }  # fmt: skip
        return {"label": self.cell.label, **vars(self), "cell": cell}


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
        cell = record.cell
        with storage.cell_files(cell.folder, record.place, record.files) as folder:
            run = Run.load(folder)
            baseline = baselines.setdefault((cell.model, cell.dtype), run)
            identity, path = run.record.identity, storage.path(f"{CELLS_FOLDER}/{cell.folder}")
            removed = _removed(run, baseline)
            rows.append(BalanceRow(cell, path, identity.dtype, identity.quantisation, Balance.of(run), removed))
    return BalanceTable(question, rows, dict(left_out))


def _removed(run: Run, baseline: Run) -> dict[str, Estimate]:
    paired = run.prompts == baseline.prompts and run.record.inputs.same_tokens(baseline.record.inputs)
    if run is baseline or not paired:
        return {}
    by_power = contrasts(model_products(run.products), model_products(baseline.products), run.prompts)
    return {f"{component}, {queries}": contrast.removed for (queries, component), contrast in by_power.items()}
