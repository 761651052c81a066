"""Runs side by side: the balance of mask, drift and sink of each, and differences from the first with intervals.

Runs that read the same prompts are resampled together (paired: what the prompts have in common cancels); others are
resampled independently. Models of any size compare: every number is a mean over all heads of all layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posleak.axes import PARTS
from posleak.leakage import Bootstrap, Estimate
from posleak.leakage.power import Array, unbiased
from posleak.leakage.summary import Grams
from posleak.plain import plain
from posleak.runs import Run

from .sources import Refused, Source, gather, require_some

QUERIES = ("all", "early")
QUANTITIES = {
    "total": "nats²", "residual": "nats²", "mask": "share", "drift": "share", "sink": "share",
    "stabilisation": "times", "sink_attention": "share",
}  # fmt: skip
"""Columns of the balance and their units; `total` and `residual` are powers, mask, drift and sink shares of the total,
`sink_attention` the mean attention of reference queries to position 0 (it has no early queries)."""

SAME_PROMPTS = ("source", "length", "seed", "vocabulary_sha256", "method", "constant_id", "text_sha256", "ids_sha256")

Samples = tuple[float, Array]
"""A number, and the same number of every resample; NaN where it is not defined."""


@dataclass(frozen=True)
class Row:
    """One line of the table: a run, or the difference of a run from the first (`minus`)."""

    run: int
    queries: str
    cells: dict[str, Estimate]
    minus: int | None = None
    paired: bool | None = None


@dataclass(frozen=True)
class Comparison:
    """Rows for all queries, then for early ones; in each the runs, then their differences from the first."""

    labels: list[str]
    facts: list[dict[str, Any]]
    rows: list[Row]
    refused: list[Refused]
    notes: list[str]

    def name(self, row: Row) -> str:
        """`B`, or `B − A`."""
        own = self.labels[row.run]
        return own if row.minus is None else f"{own} − {self.labels[row.minus]}"

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of `posleak compare --json` (docs/report.md)."""
        records = [
            {"run": self.labels[row.run], "minus": None if row.minus is None else self.labels[row.minus],
             "queries": row.queries, "paired": row.paired, **{n: plain(cell) for n, cell in row.cells.items()}}
            for row in self.rows
        ]  # fmt: skip
        refused = [{"run": each.name, "reason": each.reason} for each in self.refused]
        return {"runs": self.facts, "units": QUANTITIES, "rows": records, "refused": refused, "notes": self.notes}


def compare(runs: Iterable[Run | str | Path]) -> Comparison:
    """Compare finished runs; those that cannot be compared are named in `refused` with the reason."""
    found, refused = gather(runs, partial=False)
    require_some(found, refused, 2, "a comparison")
    return comparison(found, refused)


def comparison(found: Sequence[Source], refused: Sequence[Refused] = ()) -> Comparison:
    """The first run is what the others are compared with."""
    first, others = found[0], found[1:]
    rows, grams = list[Row](), [{q: _grams(s, q == "early") for q in QUERIES} for s in found]
    for queries in QUERIES:
        own = [_numbers(s, grams[k][queries], queries, 0) for k, s in enumerate(found)]
        rows += [Row(k, queries, _estimates(numbers, found[k].prompts)) for k, numbers in enumerate(own)]
        for k, other in enumerate(others, start=1):
            paired = same_prompts(first, other)
            drawn = own[k] if paired else _numbers(other, grams[k][queries], queries, k)
            differences = {name: _minus(drawn[name], own[0][name]) for name in drawn}
            rows.append(Row(k, queries, _estimates(differences, min(first.prompts, other.prompts)), 0, paired))
    return Comparison([s.label for s in found], [facts(s) for s in found], rows, list(refused), _notes(found))


def same_prompts(one: Source, other: Source) -> bool:
    """Did the two runs read the same tokens, but for what stands at position 0?"""
    a, b = one.run.record, other.run.record
    if one.prompts != other.prompts or a["spec"]["seed"] != b["spec"]["seed"]:
        return False
    return all(a["inputs"].get(name) == b["inputs"].get(name) for name in SAME_PROMPTS)


def facts(source: Source) -> dict[str, Any]:
    record, spec = source.run.record, source.run.record["spec"]
    identity = record["identity"]
    return {
        "label": source.label, "model": identity["name"], "architecture": identity["architecture"],
        "layers": source.run.data.sizes["layer"], "heads": identity["heads"], "dtype": identity["dtype"],
        "quantisation": identity["quantisation"], "windows": sorted({w for w in identity["windows"] if w is not None}),
        "inputs": spec["inputs"], "first_token": record["inputs"]["first_token"], "length": spec["length"],
        "prompts": source.prompts, "seed": spec["seed"], "edits": spec["edits"], "partial": source.partial,
        "run": None if source.run.path is None else str(source.run.path),
    }  # fmt: skip


def _grams(source: Source, early: bool) -> Grams:
    return Grams.of(source.run.data, early).averaged((0, 1))


def _numbers(source: Source, grams: Grams, queries: str, stream: int) -> dict[str, Samples]:
    """Every quantity with its resamples; `stream` 0 is the run's own, so that its intervals are those of the run."""
    bootstrap = Bootstrap.of(source.prompts, source.run.record["spec"]["seed"] + 7919 * stream)
    own, shared = grams.own, grams.with_total
    found = {
        "total": _power(bootstrap, own["total"]),
        "residual": _power(bootstrap, own["residual"]),
        **{name: _ratio(bootstrap, shared[name], own["total"]) for name in PARTS},
        "stabilisation": _ratio(bootstrap, own["mask_without_sink"], own["mask"]),
    }
    if queries == "all":
        found["sink_attention"] = _mean(bootstrap, source)
    return found


def _power(bootstrap: Bootstrap, gram: Array) -> Samples:
    return float(unbiased(gram)), bootstrap.inner(gram)


def _ratio(bootstrap: Bootstrap, above: Array, below: Array) -> Samples:
    """As `Bootstrap.ratio` does it: NaN where the denominator is not clearly above 0."""
    estimate = bootstrap.ratio(above, below)
    with np.errstate(invalid="ignore", divide="ignore"):
        samples = bootstrap.inner(above) / bootstrap.inner(below)
    clear = np.isfinite(estimate.value)
    return float(estimate.value), np.where(np.isfinite(samples), samples, 0.0) if clear else np.full_like(
        samples, np.nan
    )


def _mean(bootstrap: Bootstrap, source: Source) -> Samples:
    x = np.nanmean(source.run.data["sink_attention"].values, axis=(1, 2))  # [B]
    return float(x.mean()), bootstrap.weights @ x / bootstrap.weights.sum(1)


def _minus(one: Samples, other: Samples) -> Samples:
    return one[0] - other[0], one[1] - other[1]


def _estimates(numbers: dict[str, Samples], n: int) -> dict[str, Estimate]:
    blank = Bootstrap.of(n, 0, resamples=2)
    return {
        name: Estimate(np.asarray(value), *blank.interval(samples), n=n) for name, (value, samples) in numbers.items()
    }


def _notes(found: Sequence[Source]) -> list[str]:
    """What a reader of differences must know: powers depend on where they were measured."""
    specs = [s.run.record["spec"] for s in found]
    notes = [
        f"{name} differ{'s' if name != 'prompts' else ''} between the runs ({', '.join(str(v) for v in values)})"
        for name in ("length", "inputs", "density")
        if len(values := sorted({spec[name] for spec in specs})) > 1
    ]
    dtypes = sorted({s.run.record["identity"]["dtype"] for s in found})
    return [*notes, *([f"dtype differs between the runs ({', '.join(dtypes)})"] if len(dtypes) > 1 else [])]
