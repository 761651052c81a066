"""The registry of claims: falsifiable statements, each with a test. `claim` registers one, also from a plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posleak.errors import InputError, did_you_mean
from posleak.papers import ALL, PAPERS, POSITION, Paper, named_papers, register
from posleak.plugins import load_plugins, reject_builtin_name

from .finding import Finding

if TYPE_CHECKING:
    from .lab import Lab

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
    """

    number: int
    id: str
    title: str
    sentence: str
    method: str
    test: Test
    paper: str | None = None
    metrics: bool = False


@dataclass(frozen=True, kw_only=True)
class ClaimResult(Finding):
    """A claim with its finding: an entry of claims.json and of `posleak claims --json` (docs/json.md).

    Entries without a paper were written by earlier versions, which knew only one.
    """

    number: int
    id: str
    title: str
    claim: str
    method: str
    paper: str | None = POSITION

    @classmethod
    def about(cls, claim: Claim, finding: Finding) -> ClaimResult:
        """Combine a claim with its finding."""
        about: dict[str, Any] = {"number": claim.number, "id": claim.id, "title": claim.title, "method": claim.method}
        return cls(**vars(finding), **about, claim=claim.sentence, paper=claim.paper)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the verdict."""
        return {**vars(self), "verdict": self.verdict, "too_few": self.too_few}


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
) -> Callable[[Test], Test]:
    """Register the decorated function as the test of this claim (fields as in Claim).

    paper     name of a known paper, or a new Paper; claims without a paper are your own and are tested with every paper
    metrics   set it if the test reads `lab.metrics`, to measure them together with the baseline
    """
    paper_name = _registered(id, paper)

    def add(test: Test) -> Test:
        made = Claim(number, id, title, sentence, method, test, paper_name, metrics)
        reject_builtin_name("claim", id, REGISTRY.get(id), made)
        REGISTRY[id] = made
        return test

    return add


def _registered(id: str, paper: Paper | str | None) -> str | None:
    """Return the name of a claim's paper, after registering a new one."""
    if isinstance(paper, Paper):
        register(paper)
        return paper.name
    if paper is not None and paper not in PAPERS:
        raise InputError(
            "unknown paper", where=f"claim {id}", got=paper,
            remedy=f"{did_you_mean(paper, PAPERS)} Pass a new one as Paper(name, title)",
        )  # fmt: skip
    return paper


def untestable(number: int, id: str, title: str, sentence: str, reason: str, *, paper: str) -> None:
    """Register a claim that no measurement of one checkpoint can decide; it is listed with the reason."""

    def test(lab: Lab) -> Finding:
        return Finding.not_applicable(reason)

    claim(number, id, title, sentence, "not tested: one checkpoint cannot decide it", paper=paper)(test)


def registry(paper: str = POSITION) -> list[Claim]:
    """Return the claims of a paper, or of all papers (`all`), by number, followed by your own claims from plugins."""
    from . import papers  # noqa: F401  registers the claims of the papers

    load_plugins()
    order = [*(PAPERS if paper == ALL else named_papers(paper)), None]
    chosen = [claim for claim in REGISTRY.values() if claim.paper in order]
    return sorted(chosen, key=lambda claim: (order.index(claim.paper), claim.number))
