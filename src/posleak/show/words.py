"""Sentences and names that the terminal, the page and notebooks share."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from posleak.axes import EARLY, MIN_PROMPTS

if TYPE_CHECKING:
    from .estimates import HasInterval, HasShares

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


def lead(shares: Mapping[str, HasInterval]) -> str:
    """Return the predicate of the answer: the largest source or part, if the intervals support it."""
    if "here" in shares:
        return _lead(shares, SOURCES, "gets absolute position", "from")
    return _lead(shares, READ, "leaks absolute position", "through")


def evenly(numbers: HasShares, names: Collection[str]) -> HasShares | None:
    """Return the evenly weighted decomposition of one cell if it leads to another conclusion about these shares."""
    return numbers.even if numbers.disagreement(names) else None


def _lead(shares: Mapping[str, HasInterval], names: Mapping[str, str], begins: str, by: str) -> str:
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
