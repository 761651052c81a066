"""Sentences and names that the terminal and the page share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from posleak.axes import EARLY

if TYPE_CHECKING:
    from posleak.leakage import Estimate

SOURCES = {
    "earlier": "masks of earlier layers (through the residual stream)",
    "here": "each layer’s own mask",
    "origin": "position 0 itself",
}
"""Where position comes from."""

READ = {
    "mask": "the causal mask",
    "drift": "drift of the residual stream",
    "sink": "the sink at the first tokens",
    "scaling": "the scaling of queries by position",
}
"""Where it is read."""

COMPONENTS = {"mask_without_sink": "mask without the sink", "sink_attention": "attention to position 0"}
"""Names for readers where they differ from those in the data."""

QUERIES = {"early": f"early queries (i < {EARLY})", "all": "all queries"}
MARKS = {"supported": "✓", "contradicted": "✗", "inconclusive": "?", "not applicable": "–"}
"""The marks of verdicts."""


def lead(shares: Mapping[str, Estimate]) -> str:
    """Return the predicate of the answer: the leading source, or part, only as strongly as the intervals allow."""
    if set(SOURCES) <= set(shares):
        return _lead({name: shares[name] for name in SOURCES}, SOURCES, "gets its sense of absolute position", "from")
    return _lead({name: shares[name] for name in READ if name in shares}, READ, "leaks absolute position", "through")


def _lead(shares: Mapping[str, Estimate], names: Mapping[str, str], begins: str, by: str) -> str:
    from posleak.leakage.sampled import MIN_PROMPTS

    if any(math.isnan(share.value) for share in shares.values()):
        return "shows no significant leakage of absolute position"
    n = next(iter(shares.values())).n
    if n < MIN_PROMPTS:
        return f"was measured on {n} prompts; intervals need {MIN_PROMPTS}, so the largest share is not known"
    ends = {name: _ends(share) for name, share in shares.items()}
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
    unclear = [f"perhaps {names[name]}" for name in level if ends[name][0] <= 0]
    return f"{begins} {by} {' and '.join([*clear, *unclear])}, without a significantly larger share"


def _ends(share: Estimate) -> tuple[float, float]:
    """The interval, or the value itself where all prompts give the same value."""
    value, low, high = float(share.value), float(share.low), float(share.high)
    return (value, value) if math.isnan(low) else (low, high)
