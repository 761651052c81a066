"""A comparison as text: a table for the terminal, Markdown or LaTeX."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from posleak.analyses.trace.trace import SOURCES
from posleak.leakage.summary import QUERIES
from posleak.show import numbers, terminal
from posleak.show.lines import prose
from posleak.show.words import QUERIES as QUERY_TITLES

from .compare import QUANTITIES, Comparison, ComparisonRow

TITLES = {"sink_attention": "attention to 0"}


def as_table(compared: Comparison) -> RenderableType:
    """Return terminal tables of all and of early queries, those of sources apart; intervals are below their values."""
    tables = list[RenderableType]()
    for queries in QUERIES:
        for suffix, columns in column_groups(compared).items():
            heads = [title.replace(", ", "\n") for title in columns.values()]
            table = terminal.table(["run", *heads], right=heads, wrap=["run"], title=QUERY_TITLES[queries] + suffix)
            for row in (row for row in rows_with(compared, columns) if row.queries == queries):
                label = Text(row_name(compared, row), style="" if row.minus is None else "italic")
                table.add_row(label, *(_table_cell(row, name) for name in columns))
            tables.append(table)
    return Group(*tables, *(prose(note, style="dim") for note in _notes(compared)))


def markdown(compared: Comparison) -> str:
    """Return one GitHub-flavoured Markdown table."""
    columns = titles(compared)
    lines = ["| run | queries | " + " | ".join(columns.values()) + " |", "|---|---|" + "---:|" * len(columns)]
    for row in compared.rows:
        cells = (" ".join(piece for piece in row_pieces(row, name) if piece) for name in columns)
        lines.append(f"| {_escape_markdown(row_name(compared, row))} | {row.queries} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{_escape_markdown(note)}  " for note in _notes(compared))]) + "\n"


def latex(compared: Comparison) -> str:
    """Return one booktabs table, with intervals in small type."""
    columns, queries = titles(compared), ""
    heads = " & ".join(escape_latex(title) for title in columns.values())
    lines = [r"\begin{tabular}{ll" + "r" * len(columns) + "}", r"\toprule", rf"run & queries & {heads} \\"]
    for row in compared.rows:
        lines += [r"\midrule"] if row.queries != queries else []
        queries = row.queries
        cells = " & ".join(_latex_cell(row, name) for name in columns)
        lines.append(rf"{escape_latex(row_name(compared, row))} & {queries} & {cells} \\")
    notes = (f"% {' '.join(note.split())}" for note in _notes(compared))
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *notes]) + "\n"


FORMATS: dict[str, Callable[[Comparison], str]] = {"markdown": markdown, "latex": latex}


def titles(compared: Comparison) -> dict[str, str]:
    """Return the titles of the columns by the names of their quantities."""
    texts = {name: TITLES.get(name, name) for name in compared.units}
    return {name: f"{text}, nats²" if QUANTITIES[name] == "nats²" else text for name, text in texts.items()}


def column_groups(compared: Comparison) -> dict[str, dict[str, str]]:
    """Return the columns of two tables, by the ends of their titles: what each run has, and the sources if any."""
    own, by_source = dict[str, str](), dict[str, str]()
    for name, title in titles(compared).items():
        (by_source if name in SOURCES else own)[name] = title
    return {"": own} | ({", by source": by_source} if by_source else {})


def rows_with(compared: Comparison, columns: Collection[str]) -> list[ComparisonRow]:
    """Return the rows that have a value in at least one column."""
    return [row for row in compared.rows if any(name in row.cells for name in columns)]


def legend(compared: Comparison) -> str:
    """Return the explanation of the columns and marks."""
    shares = [name for name, unit in compared.units.items() if unit == "share" and name not in TITLES]
    return (
        f"{', '.join(shares)}: shares of the total; 95% jackknife intervals over prompts; – not defined; "
        "* the difference is significant: its interval does not contain 0"
    )


def _notes(compared: Comparison) -> Iterator[str]:
    yield from (legend(compared), *compared.notes)
    yield from (f"not compared: {run.name}: {run.reason}" for run in compared.refused)


def row_name(compared: Comparison, row: ComparisonRow) -> str:
    """Return the label of a row, and whether a difference is paired."""
    return compared.name(row) + {True: " (paired)", False: " (unpaired)", None: ""}[row.paired]


def row_pieces(row: ComparisonRow, name: str) -> tuple[str, str]:
    """Return a value, signed and starred in a difference, and its interval."""
    if name not in row.cells:
        return numbers.NAN, ""
    cell, unit, difference = row.cells[name], QUANTITIES[name], row.minus is not None
    unit = "" if difference and unit == "times" else unit
    sign = "+" if difference and cell.value > 0 else ""
    star = "*" if difference and (cell.low > 0 or cell.high < 0) else ""
    return f"{sign}{numbers.shown(cell.value, unit)}{star}", numbers.interval(cell, unit)


def _table_cell(row: ComparisonRow, name: str) -> terminal.TableCell:
    value, interval = row_pieces(row, name)
    return terminal.TableCell(Text(value), interval.strip("()").replace(" … ", "…"), below=True)


def _latex_cell(row: ComparisonRow, name: str) -> str:
    value, interval = (escape_latex(piece) for piece in row_pieces(row, name))
    return value + (rf" {{\scriptsize {interval}}}" if interval else "")


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
