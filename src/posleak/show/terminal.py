"""What tables in a terminal are made of: columns, cells with intervals, bars."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Span, Text

from posleak.axes import PARTS, SCALING
from posleak.text import visible

from .colours import GLYPHS, LIGHT
from .numbers import NAN, percent, short

if TYPE_CHECKING:
    from posleak.leakage import Estimate
    from posleak.leakage.summary import Shares

BAR = 8
BLOCKS = "▁▂▃▄▅▆▇█"


class LiteralTable(Table):
    """A table whose strings are shown as they are: rich would read `[bold]` in a model's name as markup."""

    def add_row(self, *cells: RenderableType | None, **settings: Any) -> None:
        super().add_row(*(literal(cell) if isinstance(cell, str | Text) else cell for cell in cells), **settings)


def literal(cell: str | Text) -> Text:
    """The cell with control characters spelled out, before a column is made as wide as its cells."""
    text = Text(cell) if isinstance(cell, str) else cell
    if visible(text.plain) == text.plain:
        return text
    spelled = text.copy()
    spelled.plain = visible(text.plain)
    spelled.spans = [Span(_moved(text, span.start), _moved(text, span.end), span.style) for span in text.spans]
    return spelled


def _moved(text: Text, place: int) -> int:
    """Where a place in the text is after spelling out what stands before it."""
    return len(visible(text.plain[:place]))


def table(names: Iterable[str], right: Iterable[str] = (), gap: int = 2, wrap: Iterable[str] = ()) -> Table:
    """A table without lines. Columns in `right` are right-aligned; only columns in `wrap` may be broken."""
    made = LiteralTable(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for name in names:
        made.add_column(Text(name), justify="right" if name in right else "left", no_wrap=name not in wrap)
    return made


def parts_of(numbers: Shares) -> tuple[str, ...]:
    """Mask, drift and sink; and scaling in models that scale their queries by position."""
    return (*PARTS, SCALING) if SCALING in numbers.share else PARTS


def cell(found: Estimate, component: str = "") -> Text:
    """Value and interval; a dash where the value is not defined."""
    if math.isnan(found.value):
        return Text(NAN, style="dim")
    text = Text(short(found.value).rjust(4), style=LIGHT.get(component, "") if component != "total" else "")
    if not math.isnan(found.low):
        text.append(f" {short(found.low)}–{short(found.high)}", style="dim")
    return text


def share(found: Estimate) -> Text:
    """A share and its interval, in percent; a dash where the share is not defined."""
    if math.isnan(found.value):
        return Text(NAN, style="dim")
    text = Text(percent(found.value))
    if not math.isnan(found.low):
        text.append(f" {percent(found.low)}…{percent(found.high)}", style="dim")
    return text


def share_bar(shares: dict[str, float]) -> Text:
    """Positive shares as a bar; a component that cancels leakage has no length and a minus sign at the end."""
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
    """One block per value; NaN is a dot."""
    numbers = [float(value) for value in values]
    there = [value for value in numbers if not math.isnan(value)]
    bottom, top = min(there) if low is None else low, max(there) if high is None else high
    scale = (len(BLOCKS) - 1) / ((top - bottom) or 1.0)
    blocks = [
        None if math.isnan(value) else round(scale * (min(max(value, bottom), top) - bottom)) for value in numbers
    ]
    return "".join("·" if block is None else BLOCKS[block] for block in blocks)
