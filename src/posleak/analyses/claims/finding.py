"""The result of testing a claim, and the rule that turns it into a verdict. The same rule applies to every test.

A claim states that an effect lies above (or below) a value that means no effect. The interval decides:

    supported       the whole interval lies on the claimed side
    contradicted    the whole interval lies on the other side
    inconclusive    the interval contains the value of no effect, or n < 16: the coverage of such an interval may be
                    below its level (docs/definitions.md), and another random seed could change the verdict
    not applicable  the model or the input lacks what the claim is about; `reason` says why
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from posleak.leakage import Estimate
from posleak.typed import Number

ENOUGH = 16
"""The smallest n (prompts, heads or tokens) for a verdict."""


class Verdict(Enum):
    SUPPORTED = "supported"
    CONTRADICTED = "contradicted"
    INCONCLUSIVE = "inconclusive"
    NOT_APPLICABLE = "not applicable"


class Side(Enum):
    """The claimed side of the value of no effect."""

    ABOVE = "above"
    BELOW = "below"


@dataclass(frozen=True)
class Kept:
    """The share of a component's power that remains under an edit: ratio = after / before, paired; 1 is no change.

    queries   all or early
    layers    all, or `after the first`
    """

    component: str
    ratio: Estimate
    queries: str = "all"
    layers: str = "all"

    @property
    def name(self) -> str:
        """`residual, early`; `drift, after the first layer`"""
        queries = ", early" if self.queries == "early" else ""
        return self.component + queries + (", after the first layer" if self.layers != "all" else "")


@dataclass(frozen=True)
class Edited:
    """A condition that was compared with the baseline.

    edit    its text;  about: what it does, in a few words
    kept    powers that remain under the edit
    attention_before, attention_after
            mean attention of reference queries to position 0; if it falls to almost 0, the edit has also removed the
            sink, which may not be intended
    """

    edit: str
    about: str
    kept: tuple[Kept, ...]
    attention_before: Number
    attention_after: Number


Detail = Estimate | int | Number | str
"""An additional number or fact."""


@dataclass(frozen=True)
class Finding:
    """The result of a test: an effect with its interval.

    no_effect   the value that means no effect;  side: the claimed side of it
    reason      why the claim is not applicable, else None
    edited      the condition that was compared with the baseline, if there is one
    """

    effect: Number
    low: Number
    high: Number
    unit: str
    n: int
    no_effect: float = 0.0
    side: Side = Side.ABOVE
    reason: str | None = None
    edited: Edited | None = None
    details: dict[str, Detail] = field(default_factory=dict)

    @classmethod
    def of(cls, estimate: Estimate, unit: str, **more: Any) -> Finding:
        """Return the finding for one cell of an estimate."""
        value, low, high = (float(x) for x in (estimate.value, estimate.low, estimate.high))
        return cls(value, low, high, unit, estimate.n, **more)

    @classmethod
    def not_applicable(cls, reason: str) -> Finding:
        """Return the finding for a claim that cannot be tested here."""
        return cls(math.nan, math.nan, math.nan, "", 0, reason=reason)

    @property
    def estimate(self) -> Estimate:
        return Estimate(np.asarray(self.effect), np.asarray(self.low), np.asarray(self.high), self.n)

    @property
    def too_few(self) -> bool:
        """Whether n is too small for a verdict."""
        return self.reason is None and self.n < ENOUGH

    @property
    def verdict(self) -> Verdict:
        if self.reason is not None:
            return Verdict.NOT_APPLICABLE
        return Verdict.INCONCLUSIVE if self.too_few else self.by_interval

    @property
    def by_interval(self) -> Verdict:
        """The verdict by the interval alone, for any n."""
        above, below = self.low > self.no_effect, self.high < self.no_effect
        if not (above or below):
            return Verdict.INCONCLUSIVE
        return Verdict.SUPPORTED if above == (self.side is Side.ABOVE) else Verdict.CONTRADICTED
