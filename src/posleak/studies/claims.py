"""The paper's claims (arXiv 2606.06160), each with its sentence, its test, and the rule of `verdicts` to judge it.

The paper's protocol is not public: the definitions are ours (docs/definitions.md), and so is every test. Numbers 1 to
11 group the claims; a claim with several sides has an entry for each, with its own effect, interval and verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from posleak.errors import PosleakError
from posleak.plain import plain
from posleak.stopwatch import stage

from .lab import Lab
from .verdicts import Finding, Verdict

Test = Callable[[Lab], Finding]


@dataclass(frozen=True)
class Claim:
    """A sentence that can be wrong, and how it is put to the test."""

    number: int
    id: str
    sentence: str
    method: str
    test: Test


@dataclass(frozen=True)
class Result:
    """A claim and what was found."""

    claim: Claim
    finding: Finding

    @property
    def verdict(self) -> Verdict:
        return self.finding.verdict

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of one claim (docs/json.md)."""
        found = self.finding
        return {
            "number": self.claim.number, "id": self.claim.id, "claim": self.claim.sentence,
            "verdict": found.verdict.value, "effect": plain(found.effect), "low": plain(found.low),
            "high": plain(found.high), "unit": found.unit, "n": found.n, "no_effect": found.no_effect,
            "side": found.side.value, "method": self.claim.method, "reason": found.reason,
            "details": plain(found.details),
        }  # fmt: skip


CLAIMS: list[Claim] = []
"""The registry, in the order of the numbers."""


def claim(number: int, id: str, sentence: str, method: str) -> Callable[[Test], Test]:
    """Register a test as the one of a claim."""

    def register(test: Test) -> Test:
        CLAIMS.append(Claim(number, id, sentence, method, test))
        return test

    return register


def registry() -> list[Claim]:
    """All claims, in order."""
    from . import tests_of_claims  # noqa: F401  (registers them)

    return list(CLAIMS)


def examine(lab: Lab, chosen: Sequence[Claim] | None = None) -> Iterator[Result]:
    """One result after the other, so that a caller can keep each. What posleak refuses is not applicable, and why."""
    for each in registry() if chosen is None else chosen:
        lab.progress(f"claim {each.number} · {each.id}")
        try:
            with stage(each.id):
                finding = each.test(lab)
        except PosleakError as error:
            finding = Finding.not_applicable(str(error))
        yield Result(each, finding)
