"""Comparisons of runs as terminal tables, as Markdown and as LaTeX."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from posleak.show import numbers, terminal
from posleak.show.lines import prose
from posleak.show.words import QUERIES as QUERY_TITLES

from .compare import MODEL, Comparison, ComparisonRow


def as_table(compared: Comparison) -> RenderableType:
    """Return terminal tables, those of sources apart; intervals are below their values.

    There is one table of all and one of early queries; by layer or head, one for each difference from the first run.
    """
    tables = list[RenderableType]()
    titles = list(dict.fromkeys(_title(compared, row) for row in compared.shown))
    for title in titles:
        for suffix, columns in compared.column_groups.items():
            rows = [row for row in compared.rows_with(columns) if _title(compared, row) == title]
            if rows:
                tables.append(_table(compared, title + suffix, columns, rows))
    return Group(*tables, *(prose(note, style="dim") for note in compared.all_notes))


def _title(compared: Comparison, row: ComparisonRow) -> str:
    """Return the title of the table that has a row."""
    title = QUERY_TITLES[row.queries]
    return title if compared.by == MODEL else f"{compared.name(row)}, {title}"


def _table(
    compared: Comparison, title: str, columns: Mapping[str, str], rows: Sequence[ComparisonRow]
) -> terminal.FittedTable:
    """Return one table; rows about layers or heads begin with the totals of the two runs."""
    heads = [name.replace(", ", "\n") for name in columns.values()]
    totals = [f"total\n{whose}" for whose in ("first run", "this run")] if compared.by != MODEL else []
    first = "run" if compared.by == MODEL else compared.by
    table = terminal.table([first, *totals, *heads], right=[*totals, *heads], wrap=["run"], title=title)
    for row in rows:
        label = compared.place(row) or Text(compared.name(row), style="" if row.minus is None else "italic")
        both = [numbers.number(total.value) for total in compared.totals(row)] if row.at else []
        texts = [row.texts(name) for name in columns]
        short = [(Text(value), interval.strip("()").replace(" … ", "…")) for value, interval in texts]
        table.add_row(label, *both, *(terminal.TableCell(*cell, below=True) for cell in short))
    return table


def markdown(compared: Comparison) -> str:
    """Return one GitHub-flavoured Markdown table."""
    columns, first = compared.titles, compared.row_titles
    lines = [f"| {' | '.join([*first, *columns.values()])} |", "|---" * len(first) + "|" + "---:|" * len(columns)]
    for row in compared.shown:
        cells = (" ".join(piece for piece in row.texts(name) if piece) for name in columns)
        lines.append(f"| {' | '.join([*map(_escape_markdown, compared.row_labels(row)), *cells])} |")
    return "\n".join([*lines, "", *(f"{_escape_markdown(note)}  " for note in compared.all_notes)]) + "\n"


def latex(compared: Comparison) -> str:
    """Return one booktabs table, with intervals in small type."""
    columns, first, queries = compared.titles, compared.row_titles, ""
    heads = " & ".join(map(escape_latex, [*first, *columns.values()]))
    lines = [rf"\begin{{tabular}}{{{'l' * len(first)}{'r' * len(columns)}}}", r"\toprule", rf"{heads} \\"]
    for row in compared.shown:
        lines += [r"\midrule"] if row.queries != queries else []
        queries = row.queries
        pieces = [[escape_latex(piece) for piece in row.texts(name)] for name in columns]
        cells = [value + (rf" {{\scriptsize {interval}}}" if interval else "") for value, interval in pieces]
        lines.append(rf"{' & '.join([*map(escape_latex, compared.row_labels(row)), *cells])} \\")
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
