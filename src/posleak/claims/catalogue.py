"""Claims: sentences that can be wrong, each with its test. `claim` registers one, from here or from a plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posleak.plugins import load_plugins, own_name

from .finding import Finding

if TYPE_CHECKING:
    from .lab import Lab

Test = Callable[["Lab"], Finding]


@dataclass(frozen=True)
class Claim:
    """A sentence that can be wrong, and how it is put to the test.

    number   groups claims: one with several sides has an entry for each
    id       its name for programs;  title: its name for people, in a few words
    method   how it is tested, in words
    """

    number: int
    id: str
    title: str
    sentence: str
    method: str
    test: Test


@dataclass(frozen=True, kw_only=True)
class Result(Finding):
    """A claim and what was found: an entry of claims.json, and of `posleak claims --json` (docs/json.md)."""

    number: int
    id: str
    title: str
    claim: str
    method: str

    @classmethod
    def about(cls, claim: Claim, found: Finding) -> Result:
        """A finding as the result of its claim."""
        about: dict[str, Any] = {"number": claim.number, "id": claim.id, "title": claim.title, "method": claim.method}
        return cls(**vars(found), **about, claim=claim.sentence)

    def as_dict(self) -> dict[str, Any]:
        """Its fields, and the verdict that follows from them."""
        return {**vars(self), "verdict": self.verdict, "too_few": self.too_few}


CLAIMS: dict[str, Claim] = {}
"""The registry, by id."""


def claim(number: int, id: str, title: str, sentence: str, method: str) -> Callable[[Test], Test]:
    """Register the decorated function as the test of this claim."""

    def register(test: Test) -> Test:
        made = Claim(number, id, title, sentence, method, test)
        own_name("claim", id, CLAIMS.get(id), made)
        CLAIMS[id] = made
        return test

    return register


def registry() -> list[Claim]:
    """All claims, including those of plugins, in the order of their numbers."""
    from . import paper  # noqa: F401  registers the paper's

    load_plugins()
    return sorted(CLAIMS.values(), key=lambda each: each.number)
