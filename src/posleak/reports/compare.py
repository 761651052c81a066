"""Comparison of runs: every quantity of each run, and its difference from the first run, with intervals.

Differences between runs on the same prompts are paired; other runs are treated as independent. Quantities are means
over all heads of all layers, so that models of any size can be compared. In runs of one architecture they can also be
means over the heads of each layer, or those of each head. Quantities are in the leading norm; notes say where evenly
weighted ones lead to another conclusion. A run of the first run's model and prompts is weighted by the first run's
attention, all others by their own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from posleak.analyses.trace.trace import CAUSES, SOURCES
from posleak.axes import HEAD, LAYER, LEFT, OFFSET, PARTS, SCALING, layer_names
from posleak.defaults import COMPARED_BY
from posleak.errors import InputError
from posleak.leakage import Contrast, Estimate, Jackknife, Sampled
from posleak.leakage.sampled import LEVEL
from posleak.leakage.summary import NORMS, QUERIES, STABILISATION, PowerKey, Products
from posleak.runs.run import Run
from posleak.show import numbers
from posleak.show.notebook import html_table, value_with_interval
from posleak.signatures import checked
from posleak.text import visible
from posleak.typed import plain

from .gather import Refused, RunLike, gather, require_some
from .view import RunView

ALWAYS = {
    "total": "nats²", "residual": "nats²", **dict.fromkeys(PARTS, "share"), "stabilisation": "times",
    "sink_attention": "share",
}  # fmt: skip
BORROWED = "borrowed"
CONTRIBUTIONS = {name: f"{name}_contribution" for name in (*PARTS, SCALING, *SOURCES)}
"""Contributions to the total, ⟨x, total⟩, by the name of the part or source x: share times total. They add up to the
total and are defined where shares are not, as in most heads. Rows about layers and heads have them."""

QUANTITIES = (
    ALWAYS
    | {SCALING: "share", **dict.fromkeys(SOURCES, "share"), BORROWED: "nats²"}
    | dict.fromkeys(CONTRIBUTIONS.values(), "nats²")
)
"""Quantities and their units. Parts and sources are shares of the total. `sink_attention` is the mean attention of the
reference queries to position 0, not defined for early queries. Sources, and what is `left`, need a trace. BORROWED is
the total in rows with borrowed keys; it needs a borrowed context."""

TITLES = {"sink_attention": "attention to 0", BORROWED: "with borrowed keys"} | {
    contribution: name for name, contribution in CONTRIBUTIONS.items()
}
"""Titles of columns that differ from the names of their quantities."""

MODEL, BY_LAYER, BY_HEAD = COMPARED_BY
AVERAGED: dict[str, tuple[int, ...]] = {MODEL: (0, 1), BY_LAYER: (1,), BY_HEAD: ()}
"""The axes of [L, H] over which quantities are means."""

SHOWN_HEADS = 12
"""Number of heads that tables show for each difference. JSON has all heads."""


@dataclass(frozen=True)
class ComparisonRow:
    """The quantities of a run by name, or their differences from the run `minus`; runs are indices of the labels.

    at             index of the attention call, and of the head in it, as far as quantities are not means over them
    simultaneous   differences with intervals that hold jointly for all layers or heads (Bonferroni)
    """

    run: int
    queries: str
    cells: dict[str, Estimate]
    minus: int | None = None
    paired: bool | None = None
    at: tuple[int, ...] = ()
    simultaneous: dict[str, Estimate] = field(default_factory=dict)

    def texts(self, name: str) -> tuple[str, str]:
        """Return a value, signed and starred in a difference, and its interval."""
        if name not in self.cells:
            return numbers.NAN, ""
        cell, unit, difference = self.cells[name], QUANTITIES[name], self.minus is not None
        unit = "" if difference and unit == "times" else unit
        sign = "+" if difference and cell.value > 0 else ""
        star = "*" * (difference and _sign(cell) != 0)
        star += "*" * (name in self.simultaneous and _sign(self.simultaneous[name]) != 0)
        return f"{sign}{numbers.shown(cell.value, unit)}{star}", numbers.interval(cell, unit)


@dataclass(frozen=True, repr=False)
class Comparison:
    """Rows of all queries, then of early queries; in each, the runs and then their differences from the first run.

    by         what a row is about: MODEL, BY_LAYER or BY_HEAD
    layer_ids  the model's layer id of each attention call, unless rows are about models
    """

    labels: list[str]
    facts: list[dict[str, Any]]
    rows: list[ComparisonRow]
    refused: list[Refused]
    notes: list[str]
    by: str = MODEL
    layer_ids: tuple[int, ...] = ()

    def __repr__(self) -> str:
        refused = f"; {len(self.refused)} refused" if self.refused else ""
        by = f"; by {self.by}" if self.by != MODEL else ""
        return f"Comparison({visible(', '.join(self.labels))}{by}{refused})"

    def _repr_html_(self) -> str:
        """Return the rows that tables show, for notebooks."""
        columns = self.titles
        rows = (
            [*self.row_labels(row), *(value_with_interval(*row.texts(name)) for name in columns)] for row in self.shown
        )
        titles = [*self.row_titles, *columns.values()]
        return html_table(", ".join(self.labels), "differences from the first run", [], rows, titles, self.all_notes)

    @property
    def units(self) -> dict[str, str]:
        """Units of the quantities that at least one run has."""
        present = {name for row in self.rows for name in row.cells}
        return {name: unit for name, unit in QUANTITIES.items() if name in ALWAYS or name in present}

    @property
    def titles(self) -> dict[str, str]:
        """Titles of the columns by the names of their quantities: contributions instead of shares if there are any."""
        columns = dict.fromkeys(
            CONTRIBUTIONS[name] if CONTRIBUTIONS.get(name) in self.units else name for name in self.units
        )
        texts = {name: TITLES.get(name, name) for name in columns}
        return {name: f"{text}, nats²" if QUANTITIES[name] == "nats²" else text for name, text in texts.items()}

    @property
    def column_groups(self) -> dict[str, dict[str, str]]:
        """Titles of the columns of two tables, by the ends of the tables' titles: what each run has, and sources."""
        of_sources = {*SOURCES, *(CONTRIBUTIONS[name] for name in SOURCES)}
        own = {name: title for name, title in self.titles.items() if name not in of_sources}
        by_source = {name: title for name, title in self.titles.items() if name in of_sources}
        return {"": own} | ({", by source": by_source} if by_source else {})

    @property
    def legend(self) -> str:
        """Explanation of the columns and marks."""
        shares = [name for name, unit in self.units.items() if unit == "share" and name not in TITLES]
        whole = "contributions to the total, which add up to it" if self.by != MODEL else "shares of the total"
        jointly = f"; ** so does the simultaneous interval over all {self.by}s (Bonferroni)"
        return (
            f"{', '.join(shares)}: {whole}; weighted by the attention of late queries, in runs of the same "
            f"model and prompts by that of {self.labels[0]}; 95% jackknife intervals over prompts; – not defined; "
            f"* the difference is significant: its interval does not contain 0{jointly if self.by != MODEL else ''}"
        )

    @property
    def all_notes(self) -> list[str]:
        """The legend, the notes, and the reasons of refused runs."""
        refused = (f"not compared: {run.name}: {run.reason}" for run in self.refused)
        return [self.legend, *self.notes, *refused]

    def rows_with(self, columns: Collection[str]) -> list[ComparisonRow]:
        """Return the shown rows that have a value in at least one column."""
        return [row for row in self.shown if any(name in row.cells for name in columns)]

    def name(self, row: ComparisonRow) -> str:
        """Return the label of a row: `B`, or `B − A (paired)`."""
        if row.minus is None:
            return self.labels[row.run]
        return f"{self.labels[row.run]} − {self.labels[row.minus]} ({'paired' if row.paired else 'unpaired'})"

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `posleak compare --json` (docs/report.md)."""
        rows = [
            {"run": self.labels[row.run], "minus": None if row.minus is None else self.labels[row.minus],
             "queries": row.queries, "paired": row.paired, **self._place(row), **row.cells}
            for row in self.rows
        ]  # fmt: skip
        fields: dict[str, Any] = plain(
            {
                "by": self.by, "runs": self.facts, "units": self.units, "rows": rows, "refused": self.refused,
                "notes": self.notes,
            }
        )  # fmt: skip
        return fields

    def _place(self, row: ComparisonRow) -> dict[str, Any]:
        if not row.at:
            return {}
        labels = {"layer": self.layer_ids[row.at[0]]} | dict(zip(("call", "head"), row.at))
        return labels if row.minus is None else labels | {"simultaneous": row.simultaneous}

    @property
    def row_titles(self) -> list[str]:
        """Titles of the columns of `row_labels`."""
        return ["run", "queries"] + ([] if self.by == MODEL else [self.by])

    def row_labels(self, row: ComparisonRow) -> list[str]:
        """Return what a row of a table is about."""
        return [self.name(row), row.queries] + ([] if self.by == MODEL else [self.place(row)])

    def totals(self, row: ComparisonRow) -> list[Estimate]:
        """Return the totals whose difference a row has, of the first run first."""
        of = {(other.run, other.queries, other.at): other for other in self.rows if other.minus is None}
        return [of[run, row.queries, row.at].cells["total"] for run in (row.minus or 0, row.run)]

    def place(self, row: ComparisonRow) -> str:
        """Return the layer `3` or the head `3.1` of a row; an empty string if it is about a model."""
        call, *head = row.at or (None,)
        return "" if call is None else ".".join([layer_names(self.layer_ids)[call], *map(str, head)])

    @property
    def shown(self) -> list[ComparisonRow]:
        """The rows that tables show: all rows about models; by layer or head, the differences of all queries.

        Of the heads, those with the largest differences of the total, largest first.
        """
        if self.by == MODEL:
            return self.rows
        rows = [row for row in self.rows if row.minus is not None and row.queries == QUERIES[0]]
        if self.by == BY_LAYER:
            return rows
        of_runs = ([row for row in rows if row.run == k] for k in range(1, len(self.labels)))
        return [row for own in of_runs for row in sorted(own, key=_size_of_difference)[:SHOWN_HEADS]]


@checked
def compare(runs: Iterable[RunLike], *, by: str = MODEL) -> Comparison:
    """Compare finished runs with the first one: every quantity, its difference and their intervals.

    Runs with a trace are also compared by source. Runs that cannot be compared are in `refused`, with the reason.

    runs        two or more runs, traces or run folders
    by          `model`: means over all heads; `layer`, `head`: each layer or head, in runs of one architecture

    Example: `posleak.compare(["runs/step1000", "runs/step2000"]).rows`
    """
    if by not in COMPARED_BY:
        raise InputError("a comparison cannot be made by this", where="by", got=by, expected=" or ".join(COMPARED_BY))
    views, refused = gather(runs, unfinished=False, only_traces=True)
    require_some(views, refused, 2, "a comparison")
    if by != MODEL:
        others = {id(view): reason for view in views[1:] if (reason := _other_heads(views[0], view)) is not None}
        refused = [*refused, *(Refused(view.label, others[id(view)]) for view in views if id(view) in others)]
        views = [view for view in views if id(view) not in others]
        require_some(views, refused, 2, f"a comparison by {by}")
    compared = comparison(views, refused, by)
    return replace(
        compared, notes=[*compared.notes, *(f"{view.label}: {note}" for view in views for note in view.notes)]
    )


def comparison(views: Sequence[RunView], refused: Sequence[Refused] = (), by: str = MODEL) -> Comparison:
    """Compare runs with the first of them."""
    first = views[0].run
    paired = [first.prompts == view.run.prompts and _same_tokens(first, view.run) for view in views]
    weights = [first if pair and _same_shape(first, view.run) else view.run for pair, view in zip(paired, views)]
    own = [_quantities(view, run, AVERAGED[by]) for view, run in zip(views, weights)]
    places = [tuple(at) for at in np.argwhere(views[0].existing.any(axis=AVERAGED[by])).tolist()]
    leading, even = (
        [row for queries in QUERIES for row in _rows(queries, own, norm, paired, places)] for norm in NORMS
    )
    compared = Comparison(
        [view.label for view in views], [facts(view) for view in views], leading, list(refused), [], by,
        () if by == MODEL else first.summary.layer_ids,
    )  # fmt: skip
    disagreements = _disagreements if by == MODEL else _counts
    return replace(compared, notes=[*_differing(views), *disagreements(compared, even)])


def _other_heads(first: RunView, other: RunView) -> str | None:
    """Return why layers and heads of two runs do not correspond; None if they do."""
    one, two = (
        f"{view.record.identity.architecture}, {len(view.record.calibration.heads)} layers of "
        f"{view.record.identity.heads} heads"
        for view in (first, other)
    )
    same = first.record.identity.architecture == other.record.identity.architecture
    same &= first.summary.layer_ids == other.summary.layer_ids
    if same and np.array_equal(first.existing, other.existing):
        return None
    return (
        f"its layers and heads do not correspond to those of {first.label} ({two}; {first.label}: {one}). Compare "
        f"means over all heads instead: omit --by, or use by={MODEL!r}"
    )


def _same_tokens(one: Run, other: Run) -> bool:
    return one.record.inputs.same_tokens(other.record.inputs)


def _same_shape(one: Run, other: Run) -> bool:
    """Return whether two runs have the same architecture, layers, heads and offsets."""
    same = one.record.identity.architecture == other.record.identity.architecture
    return same and all(one.data[axis].equals(other.data[axis]) for axis in (LAYER, HEAD, OFFSET))


def _rows(
    queries: str,
    own: Sequence[Mapping[PowerKey, Sampled]],
    norm: str,
    paired: Sequence[bool],
    places: Sequence[tuple[int, ...]],
) -> Iterator[ComparisonRow]:
    """Yield the quantities of every run in one norm, then their differences from the first run, at every place."""
    runs = [{key.component: x for key, x in some.items() if key[:2] == (norm, queries)} for some in own]
    for k, some in enumerate(runs):
        estimates = {name: x.estimate for name, x in some.items()}
        for at in places:
            yield ComparisonRow(k, queries, {name: x[at] for name, x in estimates.items()}, at=at)
    for k, some in enumerate(runs[1:], start=1):
        both = {name: Contrast(x, runs[0][name], paired[k]) for name, x in some.items() if name in runs[0]}
        differences = {name: contrast.difference for name, contrast in both.items()}
        jointly = {name: _simultaneous(both[name], differences[name]) for name in both if places[0]}
        for at in places:
            cells, joint = ({name: x[at] for name, x in some.items()} for some in (differences, jointly))
            yield ComparisonRow(k, queries, cells, 0, paired[k], at, joint)


def _simultaneous(contrast: Contrast, difference: Estimate) -> Estimate:
    """Return the differences with intervals that hold jointly (Bonferroni) for all cells that have an interval."""
    return contrast.at(1 - (1 - LEVEL) / max(1, int(np.isfinite(difference.low).sum()))).difference


def _disagreements(compared: Comparison, even: Sequence[ComparisonRow]) -> Iterator[str]:
    """Yield what evenly weighted rows show where another part is the largest or a difference has another sign."""
    for leading, other in zip(compared.rows, even, strict=True):
        if leading.minus is None:
            groups = [[name for name in group if name in other.cells] for group in ((*PARTS, SCALING), CAUSES)]
            names = [name for group in groups if _largest(leading, group) != _largest(other, group) for name in group]
        else:
            names = [name for name, cell in leading.cells.items() if _sign(cell) != _sign(other.cells[name])]
        if names:
            texts = (f"{TITLES.get(name, name)} {' '.join(other.texts(name))}".strip() for name in names)
            yield f"{compared.name(leading)}, {leading.queries} queries, evenly weighted: {', '.join(texts)}"


def _counts(compared: Comparison, even: Sequence[ComparisonRow]) -> Iterator[str]:
    """Yield how many layers or heads differ in their total, how many of these to expect by chance, and which are shown.

    Evenly weighted rows are only counted where the difference has another sign.
    """
    for k in range(1, len(compared.labels)):
        rows = [
            (row, other)
            for row, other in zip(compared.rows, even, strict=True)
            if row.run == k and row.minus is not None and row.queries == QUERIES[0]
        ]
        tested = [(row, other) for row, other in rows if not math.isnan(row.cells["total"].low)]
        significant = sum(_sign(row.cells["total"]) != 0 for row, _ in tested)
        jointly = sum(_sign(row.simultaneous["total"]) != 0 for row, _ in tested)
        turned = sum(_sign(row.cells["total"]) != _sign(other.cells["total"]) for row, other in tested)
        name, count = compared.name(rows[0][0]), len(rows)
        yield (
            f"{name}, all queries: the total differs significantly in {significant} of {len(tested)} {compared.by}s "
            f"with an interval; {(1 - LEVEL) * len(tested):.1f} are expected by chance if none differs. It differs in "
            f"{jointly} by simultaneous intervals. Evenly weighted, {turned} have another sign or significance"
        )
        if compared.by == BY_HEAD and count > SHOWN_HEADS:
            yield (
                f"{name}: tables show the {SHOWN_HEADS} heads with the largest differences of the total, and not the "
                f"other {count - SHOWN_HEADS} (--json has all). Heads are selected by size, so that their differences "
                "are exaggerated by noise"
            )


def _size_of_difference(row: ComparisonRow) -> float:
    """Return a key that sorts the largest difference of the total first, and undefined ones last."""
    value = float(row.cells["total"].value)
    return math.inf if math.isnan(value) else -abs(value)


def _largest(row: ComparisonRow, names: Iterable[str]) -> str | None:
    defined = [name for name in names if not math.isnan(row.cells[name].value)]
    return max(defined, key=lambda name: float(row.cells[name].value), default=None)


def _sign(estimate: Estimate) -> int:
    """Return 1 or −1 if the interval does not contain 0, else 0."""
    return int(estimate.low > 0) - int(estimate.high < 0)


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


def _quantities(view: RunView, weights: Run, axes: tuple[int, ...]) -> dict[PowerKey, Sampled]:
    """Return every quantity of a run in both norms, with replicates, weighted by the attention of the run `weights`.

    axes: those of [L, H] over which quantities are means
    """
    run, trace, jackknife = view.run, view.trace, Jackknife(view.run.prompts)
    if weights is run:
        own, traced = run.products, None if trace is None else trace.products
    else:
        own, shared = run.weighted_by(weights), weights.data["weight"]
        traced = None if trace is None else Products.by_queries(trace.components, shared, SOURCES)
    quantities = dict[PowerKey, Sampled]()
    profile = run.data["profile"].values[..., 0]  # [B, L, H]
    attention = jackknife.mean(np.nanmean(profile, axis=tuple(axis + 1 for axis in axes)) if axes else profile)
    for queries in QUERIES:
        sources = {} if traced is None else traced[queries].averaged(axes).norms
        for norm, products in own[queries].averaged(axes).norms.items():
            power = {name: jackknife.inner(sums) for name, sums in products.own.items()}
            shares = {name: products.with_total[name] for name in (*PARTS, SCALING) if name in products.with_total}
            shares |= {name: sources[norm].with_total[name] for name in view.by_source}
            some = {name: power[name] for name in ("total", "residual")}
            contributions = {name: jackknife.inner(sums) for name, sums in shares.items()}
            some |= {name: x.over(power["total"]) for name, x in contributions.items()}
            some |= {CONTRIBUTIONS[name]: x for name, x in contributions.items()} if len(axes) < 2 else {}
            some[STABILISATION] = power["mask_without_sink"].over(power["mask"])
            some |= {BORROWED: power[LEFT]} if LEFT in power else {}
            some |= {"sink_attention": attention} if queries == "all" else {}
            quantities |= {PowerKey(norm, queries, name): x for name, x in some.items()}
    return quantities


def _differing(views: Sequence[RunView]) -> list[str]:
    """Return the settings that differ between the runs, since powers depend on them."""
    specs, dtypes = [view.record.spec for view in views], {view.record.identity.dtype for view in views}
    settings = {name: {getattr(spec, name) for spec in specs} for name in ("length", "inputs", "density", "origin")}
    return [
        f"{name} differ{'s' if name != 'inputs' else ''} between the runs ({', '.join(map(str, sorted(values)))}), "
        "which may explain part of the differences"
        for name, values in (settings | {"dtype": dtypes}).items()
        if len(values) > 1
    ]
