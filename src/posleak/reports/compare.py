"""Runs side by side: the balance of mask, drift and sink of each, and differences from the first with intervals.

Runs that read the same prompts are paired: what the prompts have in common cancels; others are taken as independent.
Models of any size compare: every number is a mean over all heads of all layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from posleak.axes import PARTS
from posleak.leakage import Contrast, Estimate, Jackknife, Sampled
from posleak.leakage.contrast import QUERIES
from posleak.leakage.summary import Products
from posleak.runs.run import Run
from posleak.signatures import checked
from posleak.text import visible
from posleak.typed import plain

from .gather import Given, Refused, ShownRun, gather, require_some

QUANTITIES = {
    "total": "nats²", "residual": "nats²", "mask": "share", "drift": "share", "sink": "share",
    "stabilisation": "times", "sink_attention": "share",
}  # fmt: skip
"""Columns of the balance and their units; `total` and `residual` are powers, mask, drift and sink shares of the total,
`sink_attention` the mean attention of reference queries to position 0 (not defined for early queries)."""


@dataclass(frozen=True)
class ComparisonRow:
    """One line of the table: a run, or the difference of a run from the first (`minus`)."""

    run: int
    queries: str
    cells: dict[str, Estimate]
    minus: int | None = None
    paired: bool | None = None


@dataclass(frozen=True, repr=False)
class Comparison:
    """Rows for all queries, then for early ones; in each the runs, then their differences from the first."""

    labels: list[str]
    facts: list[dict[str, Any]]
    rows: list[ComparisonRow]
    refused: list[Refused]
    notes: list[str]

    def __repr__(self) -> str:
        refused = f"; {len(self.refused)} refused" if self.refused else ""
        return f"Comparison({visible(', '.join(self.labels))}{refused})"

    def name(self, row: ComparisonRow) -> str:
        """`B`, or `B − A`."""
        own = self.labels[row.run]
        return own if row.minus is None else f"{own} − {self.labels[row.minus]}"

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of `posleak compare --json` (docs/report.md)."""
        records = [
            {"run": self.labels[row.run], "minus": None if row.minus is None else self.labels[row.minus],
             "queries": row.queries, "paired": row.paired, **row.cells}
            for row in self.rows
        ]  # fmt: skip
        refused = [{"run": each.name, "reason": each.reason} for each in self.refused]
        found: dict[str, Any] = plain(
            {"runs": self.facts, "units": QUANTITIES, "rows": records, "refused": refused, "notes": self.notes}
        )
        return found


@checked
def compare(runs: Iterable[Given]) -> Comparison:
    """Compare finished runs: each beside the first, with differences and intervals.

    Runs that cannot be compared are named in `refused` with the reason.

    runs        two or more runs, traces or folders
    """
    found, refused = gather(runs, partial=False, traces=False)
    require_some(found, refused, 2, "a comparison")
    return comparison(found, refused)


def comparison(found: Sequence[ShownRun], refused: Sequence[Refused] = ()) -> Comparison:
    """The first run is what the others are compared with."""
    first, others = found[0], found[1:]
    rows, sums = list[ComparisonRow](), [{q: s.run.products[q].averaged((0, 1)) for q in QUERIES} for s in found]
    for queries in QUERIES:
        own = [_numbers(s.run, sums[k][queries], queries) for k, s in enumerate(found)]
        rows += [ComparisonRow(k, queries, _estimates(numbers)) for k, numbers in enumerate(own)]
        for k, other in enumerate(others, start=1):
            paired = same_prompts(first.run, other.run)
            differences = {name: Contrast(number, own[0][name], paired).difference for name, number in own[k].items()}
            rows.append(ComparisonRow(k, queries, differences, 0, paired))
    return Comparison([s.label for s in found], [facts(s) for s in found], rows, list(refused), _notes(found))


def same_prompts(one: Run, other: Run) -> bool:
    """Did the two runs read the same tokens, apart from position 0?"""
    return one.prompts == other.prompts and one.record.inputs.same_tokens(other.record.inputs)


def facts(shown: ShownRun) -> dict[str, Any]:
    run, identity, spec = shown.run, shown.run.record.identity, shown.run.record.spec
    return {
        "label": shown.label, "model": identity.name, "architecture": identity.architecture,
        "layers": run.data.sizes["layer"], "heads": identity.heads, "dtype": identity.dtype,
        "quantisation": identity.quantisation, "windows": identity.spans, "inputs": spec.inputs,
        "first_token": run.record.inputs.first_token, "length": spec.length, "prompts": run.prompts,
        "seed": spec.seed, "edits": list(spec.edit_texts), "partial": shown.partial,
        "run": None if run.path is None else str(run.path),
    }  # fmt: skip


def _numbers(run: Run, products: Products, queries: str) -> dict[str, Sampled]:
    """Every quantity with its replicates."""
    jackknife = Jackknife(run.prompts)
    power = {name: jackknife.inner(sums) for name, sums in products.own.items()}
    found = {
        "total": power["total"],
        "residual": power["residual"],
        **{name: jackknife.inner(products.with_total[name]).over(power["total"]) for name in PARTS},
        "stabilisation": power["mask_without_sink"].over(power["mask"]),
    }
    if queries == "all":
        found["sink_attention"] = jackknife.mean(np.nanmean(run.data["profile"].values[..., 0], axis=(1, 2)))
    return found


def _estimates(numbers: dict[str, Sampled]) -> dict[str, Estimate]:
    return {name: number.estimate for name, number in numbers.items()}


def _notes(found: Sequence[ShownRun]) -> list[str]:
    """What a reader of differences must know: powers depend on where they were measured."""
    specs = [s.run.record.spec for s in found]
    notes = [
        f"{name} differ{'s' if name != 'inputs' else ''} between the runs ({', '.join(str(v) for v in values)})"
        for name in ("length", "inputs", "density", "origin")
        if len(values := sorted({getattr(spec, name) for spec in specs})) > 1
    ]
    dtypes = sorted({s.run.record.identity.dtype for s in found})
    return [*notes, *([f"dtype differs between the runs ({', '.join(dtypes)})"] if len(dtypes) > 1 else [])]
