"""The registry of claims, and the rule that turns the result of a test into a verdict. It is the same for every test.

A claim states that an effect lies above (or below) a value that means no effect. The interval decides:

    supported       the whole interval lies on the claimed side
    contradicted    the whole interval lies on the other side
    inconclusive    the interval contains the value of no effect, or n < 16: the coverage of such an interval may be
                    below its level (docs/definitions.md), and another random seed could change the verdict
    not applicable  the model or the input lacks what the claim is about; `reason` says why

Tests that read powers run in both norms (leakage/summary.py). The leading norm decides; the evenly weighted effect is
the detail `even`, and `even_verdict` its verdict.

`claim` registers a falsifiable statement with its test, also from a plugin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from posleak.errors import InputError, did_you_mean
from posleak.leakage import Estimate
from posleak.leakage.summary import EVEN
from posleak.papers import PAPERS, POSITION, Paper, named_papers, register
from posleak.plugins import load_plugins, reject_builtin_name
from posleak.typed import Number

if TYPE_CHECKING:
    from .lab import Lab

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
        """The name in tables, such as `residual, early` or `drift, after the first layer`."""
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
    details     further numbers and facts by name; `even`: the evenly weighted effect, if it depends on a norm
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
        above = self.low > self.no_effect
        if not (above or self.high < self.no_effect):
            return Verdict.INCONCLUSIVE
        return Verdict.SUPPORTED if above == (self.side is Side.ABOVE) else Verdict.CONTRADICTED

    @property
    def even_verdict(self) -> Verdict | None:
        """The verdict in the evenly weighted norm; None if the effect does not depend on a norm."""
        even = self.details.get(EVEN)
        if not isinstance(even, Estimate):
            return None
        value, low, high = (float(end) for end in (even.value, even.low, even.high))
        return replace(self, effect=value, low=low, high=high, n=even.n).verdict

    @property
    def disagreement(self) -> str | None:
        """The verdict in the evenly weighted norm in words, if it is not the same; else None."""
        even = self.even_verdict
        return None if even in (None, self.verdict) else f"evenly weighted: {even.value}"


Test = Callable[["Lab"], Finding]


@dataclass(frozen=True)
class Claim:
    """A falsifiable statement and its test.

    number    number within the paper; the parts of a compound claim share it
    id        name for programs;  title: short name for people
    sentence  the statement
    method    how it is tested, in words
    paper     name of the paper (posleak.papers); None: a claim of your own
    metrics   whether the test reads `Lab.metrics`, so that they are measured together with the baseline
    decided   choices that were made after data had been seen, separated by semicolons; None: sentence, test and bound
              were fixed before
    """

    number: int
    id: str
    title: str
    sentence: str
    method: str
    test: Test
    paper: str | None = None
    metrics: bool = False
    decided: str | None = None


@dataclass(frozen=True, kw_only=True)
class ClaimResult(Finding):
    """A claim with its finding: an entry of claims.json and of `posleak claims --json` (docs/json.md).

    Entries without a paper were written by earlier versions, which had only one paper.
    """

    number: int
    id: str
    title: str
    claim: str
    method: str
    paper: str | None = POSITION
    decided: str | None = None

    @classmethod
    def about(cls, claim: Claim, finding: Finding) -> ClaimResult:
        """Combine a claim with its finding."""
        about: dict[str, Any] = {"number": claim.number, "id": claim.id, "title": claim.title, "method": claim.method}
        return cls(**vars(finding), **about, claim=claim.sentence, paper=claim.paper, decided=claim.decided)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the verdicts."""
        verdicts = {"verdict": self.verdict, "even_verdict": self.even_verdict, "too_few": self.too_few}
        return {**vars(self), **verdicts}


REGISTRY: dict[str, Claim] = {}
"""All claims by id."""


def claim(
    number: int,
    id: str,
    title: str,
    sentence: str,
    method: str,
    *,
    paper: Paper | str | None = None,
    metrics: bool = False,
    decided: str | None = None,
) -> Callable[[Test], Test]:
    """Register the decorated function as the test of this claim (fields as in Claim).

    paper     name of a known paper, or a new Paper; claims without a paper are your own and are tested with every paper
    metrics   set it if the test reads `lab.metrics`, to measure them together with the baseline
    """
    name = paper.name if isinstance(paper, Paper) else paper
    if isinstance(paper, Paper):
        register(paper)
    elif paper is not None and paper not in PAPERS:
        raise InputError(
            "unknown paper", where=f"claim {id}", got=paper,
            remedy=f"{did_you_mean(paper, PAPERS)} Pass a new one as Paper(name, title)",
        )  # fmt: skip

    def add(test: Test) -> Test:
        registered = Claim(number, id, title, sentence, method, test, name, metrics, decided)
        reject_builtin_name("claim", id, REGISTRY.get(id), registered)
        REGISTRY[id] = registered
        return test

    return add


UNTESTED = "not tested: one checkpoint cannot decide it"
"""The method of a claim without a test."""


def untestable(number: int, id: str, title: str, sentence: str, reason: str, *, paper: str) -> None:
    """Register a claim that no measurement of one checkpoint can decide; it is listed with the reason."""
    register_test = claim(number, id, title, sentence, UNTESTED, paper=paper)
    register_test(lambda lab: Finding.not_applicable(reason))


def registry(paper: str | None = POSITION) -> list[Claim]:
    """Return the claims of a paper, of all papers (`all`), or all claims (None), by number; then those of plugins."""
    from . import papers  # noqa: F401  registers the claims of the papers

    load_plugins()
    order = [*(PAPERS if paper is None else named_papers(paper)), None]
    chosen = [claim for claim in REGISTRY.values() if claim.paper in order]
    return sorted(chosen, key=lambda claim: (order.index(claim.paper), claim.number))
