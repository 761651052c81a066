"""Building blocks of terminal tables: columns, cells with intervals, bars, sparklines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Span, Text

from posleak.axes import PARTS, SCALING
from posleak.text import visible

from .colours import GLYPHS, LIGHT
from .lines import Prose, longest_line, longest_piece, prose
from .numbers import NAN, percent, short

if TYPE_CHECKING:
    from .estimates import HasInterval, HasShares

BAR = 8
BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class TableCell:
    """Text and an interval behind or below it; tables that are too wide drop intervals first."""

    text: Text
    interval: str = ""
    below: bool = False

    def shown(self, intervals: bool = True, between: str = "") -> Text:
        if not (intervals and self.interval):
            return self.text
        gap = between or ("\n" if self.below else " ")
        return self.text.copy().append(gap + self.interval, style="dim not bold")

    @property
    def plain(self) -> str:
        return self.shown().plain


@dataclass(frozen=True)
class Column:
    """A column; wraps: its text may be broken into lines, most: its maximal width."""

    name: str
    right: bool = False
    wraps: bool = False
    most: int | None = None


@dataclass
class FittedTable:
    """A borderless table that fits the terminal and never truncates a number.

    If it is too wide, first its wrapping columns become narrower, then intervals are dropped with a note, then every
    row becomes a block of lines. Strings are literal: rich would read `[bold]` in a model's name as markup.
    """

    columns: tuple[Column, ...]
    gap: int = 2
    title: str = ""
    rows: list[tuple[TableCell, ...]] = field(default_factory=list)

    def add_row(self, *cells: str | Text | TableCell) -> None:
        row = (cell if isinstance(cell, TableCell) else TableCell(literal(cell)) for cell in cells)
        self.rows.append(tuple(replace(cell, text=literal(cell.text)) for cell in row))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        if self.title:
            yield prose(self.title, style="italic")
        for intervals in (True, False):
            if (widths := self._widths(width, intervals)) is not None:
                yield self._drawn(widths, intervals)
                if not intervals and any(cell.interval for row in self.rows for cell in row):
                    yield prose(LEFT_OUT.format(width=width, needed=sum(self._least(True)) + self._gaps), style="dim")
                return
        yield from self._turned()

    @property
    def _gaps(self) -> int:
        return self.gap * (len(self.columns) - 1)

    def _most(self, intervals: bool) -> list[int]:
        """Return the widths of the columns if there is room."""
        wide = [max(longest_line(column.name), self._need(at, intervals)) for at, column in enumerate(self.columns)]
        return [min(own, column.most or own) for own, column in zip(wide, self.columns, strict=True)]

    def _least(self, intervals: bool) -> list[int]:
        """Return the minimal widths of the columns; their names may be broken."""
        return [
            max(longest_piece(own.name), self._need(at, intervals, broken=own.wraps), min(NARROW, most) * own.wraps)
            for at, (own, most) in enumerate(zip(self.columns, self._most(intervals), strict=True))
        ]

    def _need(self, at: int, intervals: bool, broken: bool = False) -> int:
        """Return the width that the cells of a column need."""
        room = longest_piece if broken else longest_line
        return max((room(row[at].shown(intervals).plain) for row in self.rows), default=0)

    def _widths(self, width: int, intervals: bool) -> list[int] | None:
        """Return widths that fit, reducing the widest column first; None if no widths do."""
        least = self._least(intervals)
        widths = [max(pair) for pair in zip(self._most(intervals), least, strict=True)]
        while sum(widths) + self._gaps > width:
            room = [own - narrow for own, narrow in zip(widths, least, strict=True)]
            if not any(room):
                return None
            widths[max(range(len(widths)), key=lambda at: (room[at] > 0, widths[at]))] -= 1
        return widths

    def _drawn(self, widths: list[int], intervals: bool) -> Table:
        named = any(column.name for column in self.columns)
        table = Table(box=None, pad_edge=False, padding=(0, self.gap, 0, 0), show_header=named, header_style="bold")
        for column, width in zip(self.columns, widths, strict=True):
            table.add_column(prose(column.name), justify="right" if column.right else "left", width=width)
        for row in self.rows:
            table.add_row(*(Prose(cell.shown(intervals)) for cell in row))
        return table

    def _turned(self) -> Iterator[RenderableType]:
        """Yield each row as a block: its first cells, then one line for each other cell."""
        names = [column.name.replace("\n", ", ") for column in self.columns]
        first = next((at for at, name in enumerate(names) if name), 0)
        longest = max([len(name) for name in names[first + 1 :] if len(name) <= NARROW], default=0)
        for row in self.rows:
            pieces = [*(cell.text for cell in row[:first]), Text(names[first]), row[first].shown()]
            head = Text(" ").join(piece for piece in pieces if piece)
            head.stylize("bold")
            yield Prose(head, indent=2)
            for name, cell in zip(names[first + 1 :], row[first + 1 :], strict=True):
                lead = f"  {name:<{longest}} " if name else "  "
                for line in cell.shown(between=" ").split("\n") if cell.plain else ():
                    yield Prose(Text(lead).append_text(line), indent=4)
                    lead = "    "


NARROW = 12
"""Minimal width of a wrapped column, so that it stays readable."""

LEFT_OUT = "intervals are left out: the terminal has {width} columns, they need {needed}; --json has all of them"


def literal(cell: str | Text) -> Text:
    """Return a cell with control characters escaped, so that its width is known."""
    text = Text(cell) if isinstance(cell, str) else cell
    if visible(text.plain) == text.plain:
        return text
    spelled = text.copy()
    spelled.plain = visible(text.plain)
    moved = [[len(visible(text.plain[:place])) for place in (span.start, span.end)] for span in text.spans]
    spelled.spans = [Span(start, end, span.style) for (start, end), span in zip(moved, text.spans, strict=True)]
    return spelled


def table(
    names: Iterable[str],
    right: Iterable[str] = (),
    gap: int = 2,
    wrap: Iterable[str] = (),
    most: Mapping[str, int] | None = None,
    title: str = "",
) -> FittedTable:
    """Return an empty table; columns in `right` are right-aligned, those in `wrap` may be broken."""
    right, wrap, most = set(right), set(wrap), most or {}
    columns = tuple(Column(name, name in right, name in wrap, most.get(name)) for name in names)
    return FittedTable(columns, gap, title)


def parts_of(numbers: HasShares) -> tuple[str, ...]:
    """Return mask, drift and sink, and scaling if the model scales its queries by position."""
    return (*PARTS, SCALING) if SCALING in numbers.share else PARTS


def cell(estimate: HasInterval, component: str = "") -> TableCell:
    """Return value and interval; a dash if the value is not defined."""
    style = "" if component == "total" else LIGHT.get(component, "")
    return _cell(estimate, short(estimate.value).rjust(4), f"{short(estimate.low)}–{short(estimate.high)}", style)


def share(estimate: HasInterval) -> TableCell:
    """Return a share and its interval in percent; a dash if the share is not defined."""
    return _cell(estimate, percent(estimate.value), f"{percent(estimate.low)}…{percent(estimate.high)}")


def _cell(estimate: HasInterval, value: str, interval: str, style: str = "") -> TableCell:
    if math.isnan(estimate.value):
        return TableCell(Text(NAN, style="dim"))
    return TableCell(Text(value, style=style), "" if math.isnan(estimate.low) else interval)


def share_bar(shares: dict[str, float]) -> Text:
    """Return a bar of the positive shares; a minus sign at its end marks a component that cancels leakage."""
    if any(math.isnan(part) for part in shares.values()):
        return Text("n.s.".ljust(BAR), style="dim")
    positive = {name: max(part, 0.0) for name, part in shares.items()}
    whole = sum(positive.values()) or 1.0
    bar, drawn, edge = Text(), 0, 0.0
    for name, part in positive.items():
        edge += part / whole * BAR
        bar.append(GLYPHS[name] * (round(edge) - drawn), style=LIGHT[name])
        drawn = round(edge)
    for name, part in shares.items():
        if part < -0.05:
            bar.append("−", style=LIGHT[name])
    return bar


def spark(values: Iterable[float], low: float | None = None, high: float | None = None) -> str:
    """Return one block character per value; NaN and infinity are dots."""
    numbers = [float(value) for value in values]
    finite = [value for value in numbers if math.isfinite(value)] or [0.0]
    bottom, top = min(finite) if low is None else low, max(finite) if high is None else high
    scale = (len(BLOCKS) - 1) / ((top - bottom) or 1.0)
    levels = (scale * (min(max(value, bottom), top) - bottom) for value in numbers)
    return "".join(BLOCKS[round(level)] if math.isfinite(x) else "·" for x, level in zip(numbers, levels))
