"""Comparison of runs: every quantity of each run, and its difference from the first run, with intervals.

Differences between runs on the same prompts are paired; other runs are treated as independent. Every quantity is a mean
over all heads of all layers, so models of any size can be compared. Quantities are in the leading norm; notes say where
evenly weighted ones lead to another conclusion. A run of the first run's model and prompts is weighted by the first
run's attention, all others by their own. A comparison is printed as a terminal table, as Markdown or as LaTeX.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from posleak.analyses.trace.trace import CAUSES, SOURCES
from posleak.axes import HEAD, LAYER, LEFT, OFFSET, PARTS, SCALING
from posleak.leakage import Contrast, Estimate, Jackknife, Sampled
from posleak.leakage.summary import NORMS, QUERIES, STABILISATION, PowerKey, Products
from posleak.runs.run import Run
from posleak.show import numbers, terminal
from posleak.show.lines import prose
from posleak.show.words import QUERIES as QUERY_TITLES
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
QUANTITIES = ALWAYS | {SCALING: "share", **dict.fromkeys(SOURCES, "share"), BORROWED: "nats²"}
"""Quantities and their units. Parts and sources are shares of the total. `sink_attention` is the mean attention of the
reference queries to position 0, not defined for early queries. Sources, and what is `left`, need a trace. BORROWED is
the total in rows with borrowed keys; it needs a borrowed context."""

TITLES = {"sink_attention": "attention to 0", BORROWED: "with borrowed keys"}
"""Titles of columns that differ from the names of their quantities."""


@dataclass(frozen=True)
class ComparisonRow:
    """The quantities of a run by name, or their differences from the run `minus`; runs are indices of the labels."""

    run: int
    queries: str
    cells: dict[str, Estimate]
    minus: int | None = None
    paired: bool | None = None

    def texts(self, name: str) -> tuple[str, str]:
        """Return a value, signed and starred in a difference, and its interval."""
        if name not in self.cells:
            return numbers.NAN, ""
        cell, unit, difference = self.cells[name], QUANTITIES[name], self.minus is not None
        unit = "" if difference and unit == "times" else unit
        sign = "+" if difference and cell.value > 0 else ""
        star = "*" if difference and (cell.low > 0 or cell.high < 0) else ""
        return f"{sign}{numbers.shown(cell.value, unit)}{star}", numbers.interval(cell, unit)


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

    @property
    def titles(self) -> dict[str, str]:
        """Titles of the columns by the names of their quantities."""
        texts = {name: TITLES.get(name, name) for name in self.units}
        return {name: f"{text}, nats²" if QUANTITIES[name] == "nats²" else text for name, text in texts.items()}

    @property
    def column_groups(self) -> dict[str, dict[str, str]]:
        """Titles of the columns of two tables, by the ends of the tables' titles: what each run has, and sources."""
        own = {name: title for name, title in self.titles.items() if name not in SOURCES}
        by_source = {name: title for name, title in self.titles.items() if name in SOURCES}
        return {"": own} | ({", by source": by_source} if by_source else {})

    @property
    def legend(self) -> str:
        """Explanation of the columns and marks."""
        shares = [name for name, unit in self.units.items() if unit == "share" and name not in TITLES]
        return (
            f"{', '.join(shares)}: shares of the total; weighted by the attention of late queries, in runs of the same "
            f"model and prompts by that of {self.labels[0]}; 95% jackknife intervals over prompts; – not defined; "
            "* the difference is significant: its interval does not contain 0"
        )

    @property
    def all_notes(self) -> list[str]:
        """The legend, the notes, and the reasons of refused runs."""
        refused = (f"not compared: {run.name}: {run.reason}" for run in self.refused)
        return [self.legend, *self.notes, *refused]

    def rows_with(self, columns: Collection[str]) -> list[ComparisonRow]:
        """Return the rows that have a value in at least one column."""
        return [row for row in self.rows if any(name in row.cells for name in columns)]

    def name(self, row: ComparisonRow) -> str:
        """Return the label of a row: `B`, or `B − A (paired)`."""
        if row.minus is None:
            return self.labels[row.run]
        return f"{self.labels[row.run]} − {self.labels[row.minus]} ({'paired' if row.paired else 'unpaired'})"

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `posleak compare --json` (docs/report.md)."""
        rows = [
            {"run": self.labels[row.run], "minus": None if row.minus is None else self.labels[row.minus],
             "queries": row.queries, "paired": row.paired, **row.cells}
            for row in self.rows
        ]  # fmt: skip
        fields: dict[str, Any] = plain(
            {"runs": self.facts, "units": self.units, "rows": rows, "refused": self.refused, "notes": self.notes}
        )
        return fields


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
    first = views[0].run
    paired = [first.prompts == view.run.prompts and _same_tokens(first, view.run) for view in views]
    weights = [first if pair and _same_shape(first, view.run) else view.run for pair, view in zip(paired, views)]
    own = [_quantities(view, run) for view, run in zip(views, weights)]
    leading, even = ([row for queries in QUERIES for row in _rows(queries, own, norm, paired)] for norm in NORMS)
    compared = Comparison([view.label for view in views], [facts(view) for view in views], leading, list(refused), [])
    return replace(compared, notes=[*_differing(views), *_disagreements(compared, even)])


def _same_tokens(one: Run, other: Run) -> bool:
    return one.record.inputs.same_tokens(other.record.inputs)


def _same_shape(one: Run, other: Run) -> bool:
    """Return whether two runs have the same architecture, layers, heads and offsets."""
    same = one.record.identity.architecture == other.record.identity.architecture
    return same and all(one.data[axis].equals(other.data[axis]) for axis in (LAYER, HEAD, OFFSET))


def _rows(
    queries: str, own: Sequence[Mapping[PowerKey, Sampled]], norm: str, paired: Sequence[bool]
) -> Iterator[ComparisonRow]:
    """Yield the quantities of every run in one norm, then their differences from the first run."""
    runs = [{key.component: x for key, x in some.items() if key[:2] == (norm, queries)} for some in own]
    for k, some in enumerate(runs):
        yield ComparisonRow(k, queries, {name: x.estimate for name, x in some.items()})
    for k, some in enumerate(runs[1:], start=1):
        both = {name: Contrast(x, runs[0][name], paired[k]).difference for name, x in some.items() if name in runs[0]}
        yield ComparisonRow(k, queries, both, 0, paired[k])


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


def _quantities(view: RunView, weights: Run) -> dict[PowerKey, Sampled]:
    """Return every quantity of a run in both norms, with replicates, weighted by the attention of the run `weights`."""
    run, trace, jackknife = view.run, view.trace, Jackknife(view.run.prompts)
    if weights is run:
        own, traced = run.products, None if trace is None else trace.products
    else:
        own, shared = run.weighted_by(weights), weights.data["weight"]
        traced = None if trace is None else Products.by_queries(trace.components, shared, SOURCES)
    quantities = dict[PowerKey, Sampled]()
    attention = jackknife.mean(np.nanmean(run.data["profile"].values[..., 0], axis=(1, 2)))
    for queries in QUERIES:
        sources = {} if traced is None else traced[queries].averaged((0, 1)).norms
        for norm, products in own[queries].averaged((0, 1)).norms.items():
            power = {name: jackknife.inner(sums) for name, sums in products.own.items()}
            shares = {name: products.with_total[name] for name in (*PARTS, SCALING) if name in products.with_total}
            shares |= {name: sources[norm].with_total[name] for name in view.by_source}
            some = {name: power[name] for name in ("total", "residual")}
            some |= {name: jackknife.inner(sums).over(power["total"]) for name, sums in shares.items()}
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


def as_table(compared: Comparison) -> RenderableType:
    """Return terminal tables of all and of early queries, those of sources apart; intervals are below their values."""
    tables = list[RenderableType]()
    for queries in QUERIES:
        for suffix, columns in compared.column_groups.items():
            heads = [title.replace(", ", "\n") for title in columns.values()]
            table = terminal.table(["run", *heads], right=heads, wrap=["run"], title=QUERY_TITLES[queries] + suffix)
            for row in (row for row in compared.rows_with(columns) if row.queries == queries):
                label = Text(compared.name(row), style="" if row.minus is None else "italic")
                texts = [row.texts(name) for name in columns]
                short = [(Text(value), interval.strip("()").replace(" … ", "…")) for value, interval in texts]
                table.add_row(label, *(terminal.TableCell(*cell, below=True) for cell in short))
            tables.append(table)
    return Group(*tables, *(prose(note, style="dim") for note in compared.all_notes))


def markdown(compared: Comparison) -> str:
    """Return one GitHub-flavoured Markdown table."""
    columns = compared.titles
    lines = ["| run | queries | " + " | ".join(columns.values()) + " |", "|---|---|" + "---:|" * len(columns)]
    for row in compared.rows:
        cells = (" ".join(piece for piece in row.texts(name) if piece) for name in columns)
        lines.append(f"| {_escape_markdown(compared.name(row))} | {row.queries} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{_escape_markdown(note)}  " for note in compared.all_notes)]) + "\n"


def latex(compared: Comparison) -> str:
    """Return one booktabs table, with intervals in small type."""
    columns, queries = compared.titles, ""
    heads = " & ".join(escape_latex(title) for title in columns.values())
    lines = [r"\begin{tabular}{ll" + "r" * len(columns) + "}", r"\toprule", rf"run & queries & {heads} \\"]
    for row in compared.rows:
        lines += [r"\midrule"] if row.queries != queries else []
        queries = row.queries
        pieces = [[escape_latex(piece) for piece in row.texts(name)] for name in columns]
        cells = " & ".join(value + (rf" {{\scriptsize {interval}}}" if interval else "") for value, interval in pieces)
        lines.append(rf"{escape_latex(compared.name(row))} & {queries} & {cells} \\")
    notes = (f"% {' '.join(note.split())}" for note in compared.all_notes)
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *notes]) + "\n"


FORMATS: dict[str, Callable[[Comparison], str]] = {"markdown": markdown, "latex": latex}


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\|`*_<>\[\]])", r"\\\1", " ".join(text.split()))


LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": "$-$", "×": r"$\times$", "…": r"\ldots{}", "–": "--",
    "²": "$^2$", "<": "$<$", ">": "$>$",
}  # fmt: skip


def escape_latex(text: str) -> str:
    """Return text in which LaTeX finds no commands."""
    return "".join(LATEX.get(character, character) for character in text)
