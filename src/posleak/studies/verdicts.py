"""How a claim is judged. The rule is fixed here, before any data: no test chooses its own.

A claim says that an effect lies above (or below) a value of no effect. Its interval then decides:

    supported      the whole interval lies on the claimed side
    contradicted   the whole interval lies on the other side
    inconclusive   it contains the value of no effect
    not applicable the model or the input does not have what the claim is about; the reason is said
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from posleak.leakage import Estimate


class Verdict(Enum):
    SUPPORTED = "supported"
    CONTRADICTED = "contradicted"
    INCONCLUSIVE = "inconclusive"
    NOT_APPLICABLE = "not applicable"


class Side(Enum):
    """On which side of no effect the claim puts its effect."""

    ABOVE = "above"
    BELOW = "below"


@dataclass(frozen=True)
class Finding:
    """An effect with its interval. `details`: further numbers, JSON-ready, that a reader will want."""

    effect: float
    low: float
    high: float
    unit: str
    n: int
    no_effect: float = 0.0
    side: Side = Side.ABOVE
    reason: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, estimate: Estimate, unit: str, **more: Any) -> Finding:
        """From one cell of an estimate."""
        value, low, high = (float(x) for x in (estimate.value, estimate.low, estimate.high))
        return cls(value, low, high, unit, estimate.n, **more)

    @classmethod
    def not_applicable(cls, reason: str) -> Finding:
        return cls(math.nan, math.nan, math.nan, "", 0, reason=reason)

    @property
    def verdict(self) -> Verdict:
        if self.reason is not None:
            return Verdict.NOT_APPLICABLE
        above, below = self.low > self.no_effect, self.high < self.no_effect
        if not (above or below):
            return Verdict.INCONCLUSIVE
        return Verdict.SUPPORTED if above == (self.side is Side.ABOVE) else Verdict.CONTRADICTED
