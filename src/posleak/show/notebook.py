"""Compact HTML for notebooks: a heading, facts, a table and notes. All text is escaped, except Markup."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from posleak.text import visible

from .colours import GLYPHS, LIGHT
from .numbers import interval, number, percent
from .words import evenly

if TYPE_CHECKING:
    from .estimates import HasShares


def html_table(
    name: str,
    subtitle: str,
    facts: Iterable[str],
    rows: Iterable[Sequence[str]],
    titles: Sequence[str] = (),
    notes: Iterable[str] = (),
) -> str:
    """Return a heading, facts, a table and notes.

    titles: those of the columns, if they have any
    """
    head = _row(titles, "th") if titles else Markup()
    table = Markup("<table>{}{}</table>").format(head, _joined((_row(row) for row in rows), ""))
    heading = Markup("<b>{}</b>: {}<br><small>{}</small>").format(*map(_safe, (name, subtitle, " · ".join(facts))))
    below = _joined((Markup("<small>{}</small>").format(_safe(note)) for note in notes), "<br>")
    return str(Markup("<div>{}{}{}</div>").format(heading, table, below))


def _row(cells: Iterable[str], tag: str = "td") -> Markup:
    cell = Markup(f"<{tag} style='text-align:left'>{{}}</{tag}>")
    return Markup("<tr>{}</tr>").format(_joined((cell.format(_safe(text)) for text in cells), ""))


def _joined(pieces: Iterable[Markup], between: str) -> Markup:
    return Markup(between).join(pieces)


def _safe(text: str) -> str:
    """Return text with control characters escaped; `Markup.format` escapes the rest."""
    return text if isinstance(text, Markup) else visible(text)


def value_with_interval(value: str, interval: str) -> Markup:
    """Return a value in bold and its interval in small type."""
    return Markup("<b>{}</b> <small>{}</small>").format(value, interval)


def compact_html(
    name: str, facts: Iterable[str], numbers: Mapping[str, HasShares], names: Collection[str] = tuple(GLYPHS)
) -> str:
    """Return a heading, and a bar and a row of shares with intervals for early and for all queries.

    names: the shares to show. Evenly weighted shares follow where they lead to another conclusion.
    """
    rows = (
        _shares(queries + label, shown, names)
        for queries, decomposition in numbers.items()
        for label, shown in (("", decomposition), (", evenly weighted", evenly(decomposition, names)))
        if shown is not None
    )
    return html_table(name, "shares of position leakage", facts, rows)


def _shares(label: str, numbers: HasShares, names: Iterable[str]) -> list[str]:
    """Return a bar of the positive shares, each share and the total as the cells of a row."""
    shares = {name: numbers.share[name] for name in names if name in numbers.share}
    sizes = {name: 0.0 if math.isnan(share.value) else max(float(share.value), 0.0) for name, share in shares.items()}
    whole = sum(sizes.values()) or 1.0
    block = Markup("<span style='display:inline-block;height:12px;width:{:.0f}px;background:{}'></span>")
    bar = _joined((block.format(120 * size / whole, LIGHT[name]) for name, size in sizes.items()), "")
    texts = (
        f"{name} n.s." if math.isnan(share.value)
        else Markup("{} {}").format(name, value_with_interval(percent(share.value), interval(share, "share")))
        for name, share in shares.items()
    )  # fmt: skip
    bars = Markup("<span style='white-space:nowrap;font-size:0'>{}</span>").format(bar)
    return [label, bars, *texts, f"{number(numbers.power['total'].value)} nats²"]
