"""A comparison as text: a table for the terminal, Markdown or LaTeX for a paper."""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.text import Text

from posleak.leakage import Estimate
from posleak.leakage.contrast import QUERIES
from posleak.show import numbers, terminal
from posleak.show.lines import prose
from posleak.show.words import QUERIES as TITLES

from .compare import QUANTITIES, Comparison, ComparisonRow

HEADS = {
    "total": "total, nats²", "residual": "residual, nats²", "mask": "mask", "drift": "drift", "sink": "sink",
    "stabilisation": "stabilisation", "sink_attention": "attention to 0",
}  # fmt: skip
LEGEND = (
    "mask, drift and sink are shares of the total; 95% jackknife intervals over prompts; – not defined or not clearly "
    "above 0; * the interval of a difference does not contain 0"
)


def as_table(found: Comparison) -> RenderableType:
    """Two blocks, all and early queries; the interval stands below its number, so that it fits a terminal."""
    parts: list[RenderableType] = []
    heads = [name.replace(", ", "\n") for name in HEADS.values()]
    for queries in QUERIES:
        table = terminal.table(["run", *heads], right=heads, wrap=["run"], title=TITLES[queries])
        for row in rows_of(found, queries):
            cells = [_two_lines(row, name) for name in HEADS]
            table.add_row(Text(row_name(found, row), style="" if row.minus is None else "italic"), *cells)
        parts.append(table)
    notes = [LEGEND, *found.notes, *(f"not compared: {each.name}: {each.reason}" for each in found.refused)]
    return Group(*parts, *(prose(note, style="dim") for note in notes))


def markdown(found: Comparison) -> str:
    """One table, GitHub's flavour."""
    lines = ["| run | queries | " + " | ".join(HEADS.values()) + " |", "|---|---|" + "---:|" * len(HEADS)]
    for queries in QUERIES:
        for row in rows_of(found, queries):
            cells = (_text(row, name) for name in HEADS)
            lines.append(f"| {_pipes(row_name(found, row))} | {queries} | " + " | ".join(cells) + " |")
    notes = [LEGEND, *found.notes, *(f"not compared: {each.name}: {each.reason}" for each in found.refused)]
    return "\n".join([*lines, "", *(f"{_pipes(note)}  " for note in notes)]) + "\n"


def latex(found: Comparison) -> str:
    """A booktabs table; intervals small, in brackets."""
    lines = [
        r"\begin{tabular}{ll" + "r" * len(HEADS) + "}",
        r"\toprule",
        "run & queries & " + " & ".join(escape_latex(head) for head in HEADS.values()) + r" \\",
    ]
    for queries in QUERIES:
        lines.append(r"\midrule")
        for row in rows_of(found, queries):
            cells = " & ".join(_latex_cell(row, name) for name in HEADS)
            lines.append(f"{escape_latex(row_name(found, row))} & {queries} & {cells} \\\\")
    notes = [LEGEND, *found.notes, *(f"not compared: {each.name}: {each.reason}" for each in found.refused)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", *(f"% {' '.join(n.split())}" for n in notes)]) + "\n"


FORMATS: dict[str, Callable[[Comparison], str]] = {"markdown": markdown, "latex": latex}


def rows_of(found: Comparison, queries: str) -> list[ComparisonRow]:
    return [row for row in found.rows if row.queries == queries]


def row_name(found: Comparison, row: ComparisonRow) -> str:
    pairing = {True: " (paired)", False: " (unpaired)", None: ""}[row.paired]
    return found.name(row) + pairing


def _clear(row: ComparisonRow, cell: Estimate) -> bool:
    return row.minus is not None and bool(cell.low > 0 or cell.high < 0)


def row_pieces(row: ComparisonRow, name: str) -> tuple[str, str]:
    """The number, signed and starred in a difference, and its interval."""
    if name not in row.cells:
        return numbers.NAN, ""
    cell, unit = row.cells[name], "" if row.minus is not None and QUANTITIES[name] == "times" else QUANTITIES[name]
    sign = "+" if row.minus is not None and cell.value > 0 else ""
    star = "*" if _clear(row, cell) else ""
    return f"{sign}{numbers.shown(cell.value, unit)}{star}", numbers.interval(cell, unit)


def _text(row: ComparisonRow, name: str) -> str:
    return " ".join(piece for piece in row_pieces(row, name) if piece)


def _two_lines(row: ComparisonRow, name: str) -> terminal.TableCell:
    value, interval = row_pieces(row, name)
    return terminal.TableCell(Text(value), interval.strip("()").replace(" … ", "…"), below=True)


def _latex_cell(row: ComparisonRow, name: str) -> str:
    value, interval = (escape_latex(piece) for piece in row_pieces(row, name))
    return value + (rf" {{\scriptsize {interval}}}" if interval else "")


def _pipes(text: str) -> str:
    """Text inside a Markdown table: nothing in it may be read as markup."""
    return re.sub(r"([\\|`*_<>\[\]])", r"\\\1", " ".join(text.split()))


LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "−": "$-$", "×": r"$\times$", "…": r"\ldots{}", "–": "--",
    "²": "$^2$", "<": "$<$", ">": "$>$",
}  # fmt: skip


def escape_latex(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in text)
