"""Compact HTML of a run or a trace for notebooks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING

from posleak.text import visible

from .colours import GLYPHS, LIGHT
from .numbers import interval, number, percent

if TYPE_CHECKING:
    from posleak.leakage import Estimate
    from posleak.leakage.summary import Decomposition


def compact_html(name: str, facts: Iterable[str], numbers: Mapping[str, Decomposition]) -> str:
    """Return a heading, and a bar and a row of shares with intervals for early and for all queries."""
    rows = "".join(
        f"<tr><td style='text-align:left'>{queries}</td><td>{_bar(found.share)}</td>"
        + "".join(f"<td style='text-align:left'>{_share(part, found.share[part])}</td>" for part in _parts(found.share))
        + f"<td>{number(found.power['total'].value)} nats²</td></tr>"
        for queries, found in numbers.items()
    )
    return (
        f"<div><b>{escape(visible(name))}</b>: shares of position leakage<br>"
        f"<small>{escape(visible(' · '.join(facts)))}</small><table>{rows}</table></div>"
    )


def _parts(shares: Mapping[str, Estimate]) -> list[str]:
    return [name for name in GLYPHS if name in shares]


def _share(name: str, share: Estimate) -> str:
    if math.isnan(share.value):
        return f"{name} n.s."
    return f"{name} <b>{percent(share.value)}</b> <small>{interval(share, 'share')}</small>"


def _bar(shares: Mapping[str, Estimate]) -> str:
    """A bar of the positive shares."""
    found = {name: float(shares[name].value) for name in _parts(shares)}
    sizes = {name: max(size, 0.0) if size == size else 0.0 for name, size in found.items()}
    whole = sum(sizes.values()) or 1.0
    cells = "".join(
        f"<span style='display:inline-block;height:12px;width:{120 * size / whole:.0f}px;"
        f"background:{LIGHT[name]}'></span>"
        for name, size in sizes.items()
    )
    return f"<span style='white-space:nowrap;font-size:0'>{cells}</span>"
