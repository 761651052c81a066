"""Comparison of runs: every quantity of each run, and its difference from the first run, with intervals.

Differences between runs on the same prompts are paired; other runs are treated as independent. Every quantity is a mean
over all heads of all layers, so models of any size can be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posleak.analyses.trace.trace import SOURCES
from posleak.axes import LEFT, PARTS, SCALING
from posleak.leakage import Contrast, Estimate, Jackknife, Sampled
from posleak.leakage.summary import QUERIES, Products
from posleak.runs.run import Run
from posleak.signatures import checked
from posleak.text import visible
from posleak.typed import plain

from .gather import Refused, RunLike, gather, require_some
from .view import RunView

ALWAYS = {
    "total": "nats²", "residual": "nats²", **dict.fromkeys(PARTS, "share"), "stabilisation": "times",
    "sink_attention": "share",
}  # fmt: skip
QUANTITIES = ALWAYS | {SCALING: "share", **dict.fromkeys(SOURCES, "share"), LEFT: "nats²"}
"""Quantities and their units. Parts and sources are shares of the total. `sink_attention` is the mean attention of the
reference queries to position 0, not defined for early queries. Sources need a trace, `left` a borrowed context."""


@dataclass(frozen=True)
class ComparisonRow:
    """The quantities of a run, or their differences from another run (`minus`), by name."""

    run: int
    queries: str
    cells: dict[str, Estimate]
    minus: int | None = None
    paired: bool | None = None


@dataclass(frozen=True, repr=False)
class Comparison:
    """Rows of all queries, then of early queries; in each, the runs and then their differences from the first run."""

    labels: list[str]
    facts: list[dict[str, Any]]
    rows: list[ComparisonRow]
    refused: list[Refused]
    notes: list[str]

    def __repr__(self) -> str:
        refused = f"; {len(self.refused)} refused" if self.refused else ""
        return f"Comparison({visible(', '.join(self.labels))}{refused})"

    @property
    def units(self) -> dict[str, str]:
        """Units of the quantities that at least one run has."""
        present = {name for row in self.rows for name in row.cells}
        return {name: unit for name, unit in QUANTITIES.items() if name in ALWAYS or name in present}

    def name(self, row: ComparisonRow) -> str:
        """Return the label of a row: `B`, or `B − A`."""
        own = self.labels[row.run]
        return own if row.minus is None else f"{own} − {self.labels[row.minus]}"

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `posleak compare --json` (docs/report.md)."""
        rows = [
            {"run": self.labels[row.run], "minus": None if row.minus is None else self.labels[row.minus],
             "queries": row.queries, "paired": row.paired, **row.cells}
            for row in self.rows
        ]  # fmt: skip
        refused = [{"run": run.name, "reason": run.reason} for run in self.refused]
        made: dict[str, Any] = plain(
            {"runs": self.facts, "units": self.units, "rows": rows, "refused": refused, "notes": self.notes}
        )
        return made


@checked
def compare(runs: Iterable[RunLike]) -> Comparison:
    """Compare finished runs with the first one: every quantity, its difference and their intervals.

    Runs with a trace are also compared by source. Runs that cannot be compared are in `refused`, with the reason.

    runs        two or more runs, traces or run folders

    Example: `posleak.compare(["runs/step1000", "runs/step2000"]).rows`
    """
    views, refused = gather(runs, unfinished=False, only_traces=True)
    require_some(views, refused, 2, "a comparison")
    compared = comparison(views, refused)
    return replace(
        compared, notes=[*compared.notes, *(f"{view.label}: {note}" for view in views for note in view.notes)]
    )


def comparison(views: Sequence[RunView], refused: Sequence[Refused] = ()) -> Comparison:
    """Compare runs with the first of them."""
    first, rows = views[0], list[ComparisonRow]()
    for queries in QUERIES:
        own = [_quantities(view, queries) for view in views]
        rows += [ComparisonRow(k, queries, {n: x.estimate for n, x in some.items()}) for k, some in enumerate(own)]
        for k, view in enumerate(views[1:], start=1):
            paired = same_prompts(first.run, view.run)
            both = {name: Contrast(own[k][name], own[0][name], paired) for name in own[k] if name in own[0]}
            rows.append(ComparisonRow(k, queries, {name: c.difference for name, c in both.items()}, 0, paired))
    return Comparison([view.label for view in views], [facts(view) for view in views], rows, list(refused),
                      _notes(views))  # fmt: skip


def same_prompts(one: Run, other: Run) -> bool:
    """Return whether two runs read the same tokens, apart from position 0."""
    return one.prompts == other.prompts and one.record.inputs.same_tokens(other.record.inputs)


def facts(view: RunView) -> dict[str, Any]:
    """Return what identifies a run."""
    run, identity, spec = view.run, view.record.identity, view.record.spec
    return {
        "label": view.label, "model": identity.name, "architecture": identity.architecture,
        "layers": run.data.sizes["layer"], "heads": identity.heads, "dtype": identity.dtype,
        "quantisation": identity.quantisation, "windows": identity.spans, "inputs": spec.inputs,
        "first_token": run.record.inputs.first_token, "length": spec.length, "prompts": run.prompts,
        "seed": spec.seed, "edits": list(spec.edit_texts), "partial": view.partial,
        "run": None if run.path is None else str(run.path),
    }  # fmt: skip


def _quantities(view: RunView, queries: str) -> dict[str, Sampled]:
    """Every quantity that a run has, with its replicates."""
    run, jackknife = view.run, Jackknife(view.run.prompts)
    products = run.products[queries].averaged((0, 1))
    power = {name: jackknife.inner(sums) for name, sums in products.own.items()}
    made = {name: power[name] for name in ("total", "residual")}
    made |= _shares(products, (*PARTS, SCALING), jackknife)
    made["stabilisation"] = power["mask_without_sink"].over(power["mask"])
    if queries == "all":
        made["sink_attention"] = jackknife.mean(np.nanmean(run.data["profile"].values[..., 0], axis=(1, 2)))
    if view.trace is not None:
        made |= _shares(view.trace.products[queries].averaged((0, 1)), SOURCES, jackknife)
    return made | ({LEFT: power[LEFT]} if LEFT in power else {})


def _shares(products: Products, names: Iterable[str], jackknife: Jackknife) -> dict[str, Sampled]:
    total, sums = jackknife.inner(products.own["total"]), products.with_total
    return {name: jackknife.inner(sums[name]).over(total) for name in names if name in sums}


def _notes(views: Sequence[RunView]) -> list[str]:
    """Settings that differ between the runs, since powers depend on them."""
    specs, dtypes = [view.record.spec for view in views], {view.record.identity.dtype for view in views}
    settings = {name: {getattr(spec, name) for spec in specs} for name in ("length", "inputs", "density", "origin")}
    return [
        f"{name} differ{'s' if name != 'inputs' else ''} between the runs ({', '.join(map(str, sorted(values)))})"
        for name, values in (settings | {"dtype": dtypes}).items()
        if len(values) > 1
    ]
