"""What was found about a claim, and how it is judged. The rule is fixed here, before any data: no test chooses its own.

A claim says that an effect lies above (or below) a value of no effect. Its interval then decides:

    supported      the whole interval lies on the claimed side
    contradicted   the whole interval lies on the other side
    inconclusive   the interval contains the value of no effect, or comes from fewer than 16 prompts: below that it may
                   cover less than it says (docs/definitions.md), and another seed could turn the verdict
    not applicable the model or the input does not have what the claim is about; `reason` says why
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
"""Prompts, heads or tokens, whatever n counts, that a verdict needs."""


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
class Kept:
    """How much of a component's power an edit leaves: ratio = after / before, on the same prompts; 1 is no change.

    queries: all or early;  layers: all, or `after the first`
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
    """A condition that was compared with the baseline: the edit, what it does in a few words, and what it left.

    attention_before, attention_after: mean attention of reference queries to position 0. If it falls to almost 0, the
    edit has also removed the sink, which may not be what it was meant for.
    """

    edit: str
    about: str
    kept: tuple[Kept, ...]
    attention_before: Number
    attention_after: Number


Detail = Estimate | int | Number | str
"""A further number or fact about a finding."""


@dataclass(frozen=True)
class Finding:
    """An effect with its interval. `edited`: the condition that is compared with the baseline, if there is one."""

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
        """From one cell of an estimate."""
        value, low, high = (float(x) for x in (estimate.value, estimate.low, estimate.high))
        return cls(value, low, high, unit, estimate.n, **more)

    @classmethod
    def not_applicable(cls, reason: str) -> Finding:
        return cls(math.nan, math.nan, math.nan, "", 0, reason=reason)

    @property
    def estimate(self) -> Estimate:
        return Estimate(np.asarray(self.effect), np.asarray(self.low), np.asarray(self.high), self.n)

    @property
    def too_few(self) -> bool:
        """Is n too small for a verdict, whatever the interval says?"""
        return self.reason is None and self.n < ENOUGH

    @property
    def verdict(self) -> Verdict:
        if self.reason is not None:
            return Verdict.NOT_APPLICABLE
        return Verdict.INCONCLUSIVE if self.too_few else self.by_interval

    @property
    def by_interval(self) -> Verdict:
        """What the interval alone says, however few it is made of."""
        above, below = self.low > self.no_effect, self.high < self.no_effect
        if not (above or below):
            return Verdict.INCONCLUSIVE
        return Verdict.SUPPORTED if above == (self.side is Side.ABOVE) else Verdict.CONTRADICTED
