"""Claims: sentences that can be wrong, each with its test. `claim` registers one, from here or from a plugin."""

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
    """A sentence that can be wrong, and how it is put to the test.

    number   groups claims of a paper: one with several sides has an entry for each
    id       its name for programs;  title: its name for people, in a few words
    method   how it is tested, in words
    paper    name of the paper that makes it (posleak.papers); None: a claim of your own
    """

    number: int
    id: str
    title: str
    sentence: str
    method: str
    test: Test
    paper: str | None = None


@dataclass(frozen=True, kw_only=True)
class ClaimResult(Finding):
    """A claim and what was found: an entry of claims.json, and of `posleak claims --json` (docs/json.md).

    An entry without a paper, as earlier versions wrote them, is about the paper that they knew.
    """

    number: int
    id: str
    title: str
    claim: str
    method: str
    paper: str | None = POSITION

    @classmethod
    def about(cls, claim: Claim, found: Finding) -> ClaimResult:
        """A finding as the result of its claim."""
        about: dict[str, Any] = {"number": claim.number, "id": claim.id, "title": claim.title, "method": claim.method}
        return cls(**vars(found), **about, claim=claim.sentence, paper=claim.paper)

    def as_dict(self) -> dict[str, Any]:
        """Its fields, and the verdict that follows from them."""
        return {**vars(self), "verdict": self.verdict, "too_few": self.too_few}


REGISTRY: dict[str, Claim] = {}
"""The registry, by id."""


def claim(
    number: int, id: str, title: str, sentence: str, method: str, *, paper: Paper | str | None = None
) -> Callable[[Test], Test]:
    """Register the decorated function as the test of this claim.

    paper: who makes it, by name, or a Paper that posleak does not know yet. Claims without one are your own, and are
    tested with every paper.
    """
    home = _registered(id, paper)

    def add(test: Test) -> Test:
        made = Claim(number, id, title, sentence, method, test, home)
        reject_builtin_name("claim", id, REGISTRY.get(id), made)
        REGISTRY[id] = made
        return test

    return add


def _registered(id: str, paper: Paper | str | None) -> str | None:
    """The name of a claim's paper, which is registered now."""
    if isinstance(paper, Paper):
        register(paper)
        return paper.name
    if paper is not None and paper not in PAPERS:
        raise InputError(
            "no paper of this name", where=f"claim {id}", got=paper,
            remedy=f"{did_you_mean(paper, PAPERS)} A new one is given as Paper(name, title)",
        )  # fmt: skip
    return paper


def untestable(number: int, id: str, title: str, sentence: str, reason: str, *, paper: str) -> None:
    """Register a claim that no measurement of one checkpoint can decide: it is listed, with the reason."""

    def test(lab: Lab) -> Finding:
        return Finding.not_applicable(reason)

    claim(number, id, title, sentence, "not tested: one checkpoint cannot tell", paper=paper)(test)


def registry(paper: str = POSITION) -> list[Claim]:
    """The claims of a paper, or of every one (`all`), by number, and after them those of your own, from plugins."""
    from . import papers  # noqa: F401  registers the claims of the papers

    load_plugins()
    order = [*(PAPERS if paper == ALL else named_papers(paper)), None]
    found = [each for each in REGISTRY.values() if each.paper in order]
    return sorted(found, key=lambda each: (order.index(each.paper), each.number))
