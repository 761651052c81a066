"""Sentences and names that the terminal and the page share, and a compact view for notebooks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING

from posleak.axes import EARLY
from posleak.text import visible

from .colours import GLYPHS, LIGHT
from .numbers import interval, number, percent

if TYPE_CHECKING:
    from posleak.leakage import Estimate
    from posleak.leakage.summary import Decomposition

SOURCES = {
    "state": "the state that other layers than attention carry",
    "earlier": "masks of earlier layers (through the residual stream)",
    "here": "each layer’s own mask",
    "origin": "the distance to position 0",
}
"""Where position comes from; `state` only if layers other than attention carry something from token to token."""

READ = {
    "mask": "the causal mask",
    "drift": "drift of the residual stream",
    "sink": "the sink at the first tokens",
    "scaling": "the scaling of queries by position",
}
"""Where position is read."""

COMPONENTS = {"mask_without_sink": "mask without the sink", "sink_attention": "attention to position 0"}
"""Names for readers where they differ from those in the data."""

QUERIES = {"early": f"early queries (i < {EARLY})", "all": "all queries"}
MARKS = {"supported": "✓", "contradicted": "✗", "inconclusive": "?", "not applicable": "–"}
"""The marks of verdicts."""


def lead(shares: Mapping[str, Estimate]) -> str:
    """Return the predicate of the answer: the largest source or part, if the intervals support it."""
    if "here" in shares:
        return _lead(shares, SOURCES, "gets absolute position", "from")
    return _lead(shares, READ, "leaks absolute position", "through")


def evenly(numbers: Decomposition, names: Collection[str]) -> Decomposition | None:
    """Return the evenly weighted decomposition of one cell if it leads to another conclusion about these shares."""
    return numbers.even if numbers.disagreement(names) else None


def _lead(shares: Mapping[str, Estimate], names: Mapping[str, str], begins: str, by: str) -> str:
    from posleak.leakage.sampled import MIN_PROMPTS

    shares = {name: shares[name] for name in names if name in shares}
    if any(math.isnan(share.value) for share in shares.values()):
        return "shows no significant leakage of absolute position"
    n = next(iter(shares.values())).n
    if n < MIN_PROMPTS:
        return f"was measured on {n} prompts; intervals need {MIN_PROMPTS}, so the largest share is not known"
    ends = {name: (float(share.low), float(share.high)) for name, share in shares.items()}
    for name, share in shares.items():
        if math.isnan(share.low):  # all prompts give the same value
            ends[name] = float(share.value), float(share.value)
    first, *others = sorted(ends, key=lambda name: -float(shares[name].value))
    low = ends[first][0]
    if low <= 0:
        return f"{begins}, but no share is significantly above 0"
    level = [name for name in others if ends[name][1] >= low]
    if not level and low > 0.5 and all(ends[name][1] < 0.5 for name in others):
        return f"{begins} mostly {by} {names[first]}"
    if not level:
        return f"{begins} more {by} {names[first]} than {by} anything else"
    clear = [names[name] for name in (first, *level) if ends[name][0] > 0]
    unclear = [f"possibly {names[name]}" for name in level if ends[name][0] <= 0]
    return f"{begins} {by} {' and '.join([*clear, *unclear])}, with no significantly largest share"


def compact_html(
    name: str, facts: Iterable[str], numbers: Mapping[str, Decomposition], names: Collection[str] = tuple(GLYPHS)
) -> str:
    """Return a heading, and a bar and a row of shares with intervals for early and for all queries.

    names: the shares to show. Evenly weighted shares follow where they lead to another conclusion.
    """
    rows = "".join(
        _row(queries + label, shown, names)
        for queries, decomposition in numbers.items()
        for label, shown in (("", decomposition), (", evenly weighted", evenly(decomposition, names)))
        if shown is not None
    )
    return (
        f"<div><b>{escape(visible(name))}</b>: shares of position leakage<br>"
        f"<small>{escape(visible(' · '.join(facts)))}</small><table>{rows}</table></div>"
    )


def _row(label: str, numbers: Decomposition, names: Iterable[str]) -> str:
    """Return a bar of the positive shares, each share and the total as a row of an HTML table."""
    shares = {name: numbers.share[name] for name in names if name in numbers.share}
    sizes = {name: 0.0 if math.isnan(share.value) else max(float(share.value), 0.0) for name, share in shares.items()}
    whole = sum(sizes.values()) or 1.0
    bar = "".join(
        f"<span style='display:inline-block;height:12px;width:{120 * size / whole:.0f}px;"
        f"background:{LIGHT[name]}'></span>"
        for name, size in sizes.items()
    )
    texts = (
        f"{name} n.s." if math.isnan(share.value)
        else f"{name} <b>{percent(share.value)}</b> <small>{interval(share, 'share')}</small>"
        for name, share in shares.items()
    )  # fmt: skip
    cells = "".join(f"<td style='text-align:left'>{text}</td>" for text in texts)
    return (
        f"<tr><td style='text-align:left'>{label}</td>"
        f"<td><span style='white-space:nowrap;font-size:0'>{bar}</span></td>"
        f"{cells}<td>{number(numbers.power['total'].value)} nats²</td></tr>"
    )
