"""Sentences and names that several places show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from posleak.axes import EARLY

if TYPE_CHECKING:
    from posleak.leakage import Estimate

SOURCES = {
    "mask": "the causal mask",
    "drift": "drift of the residual stream",
    "sink": "the sink at position 0",
    "scaling": "the scaling of queries by position",
}
COMPONENTS = {"mask_without_sink": "mask without the sink", "sink_attention": "attention to position 0"}
"""Names for people where they differ from those in the data."""

QUERIES = {"early": f"early queries (i < {EARLY})", "all": "all queries"}
MARKS = {"supported": "✓", "contradicted": "✗", "inconclusive": "?", "not applicable": "–"}
"""The marks of verdicts."""


def lead(shares: Mapping[str, Estimate]) -> str:
    """How the answer begins: which source is ahead, said only as strongly as the intervals allow."""
    names = [name for name in SOURCES if name in shares]
    if any(math.isnan(shares[name].value) for name in names):
        return "shows no leakage of absolute position that is clearly above noise"
    order = sorted(names, key=lambda name: -float(shares[name].value))
    first = shares[order[0]]
    ahead = [SOURCES[name] for name in order if shares[name].high >= first.low]
    if first.low > 0.5:
        return f"gets its sense of absolute position mostly from {ahead[0]}"
    if len(ahead) == 1:
        return f"gets its sense of absolute position more from {ahead[0]} than from any other source"
    neither = "neither" if len(ahead) == 2 else "none of them"
    return f"gets its sense of absolute position from {' and '.join(ahead)}, {neither} clearly ahead"
