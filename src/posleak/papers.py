"""Papers whose claims can be tested, by the names that `--paper` accepts.

This module does not import torch, so that a wrong name is rejected immediately.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from posleak.errors import InputError, did_you_mean
from posleak.plugins import load_plugins

POSITION, SINKS, WAVELETS, OWN_CLAIMS = "position", "sinks", "wavelets", "posleak"
ALL = "all"
"""The name that stands for every paper."""

OWN = "claims of your own"
"""Heading of claims without a paper."""


@dataclass(frozen=True)
class Paper:
    """A paper: its name on the command line, its title, and its arXiv id if it has one."""

    name: str
    title: str
    arxiv: str | None = None

    @property
    def heading(self) -> str:
        """Return the title with the arXiv id: `Title (arXiv 2606.06160)`."""
        return self.title if self.arxiv is None else f"{self.title} (arXiv {self.arxiv})"


_BUILT_IN = {
    paper.name: paper
    for paper in (
        Paper(POSITION, "Where does Absolute Position come from in decoder-only Transformers?", "2606.06160"),
        Paper(SINKS, "What are you sinking? A geometric approach on attention sink", "2508.02546"),
        Paper(WAVELETS, "Beyond Position: the emergence of wavelet-like properties in Transformers", "2410.18067"),
        Paper(OWN_CLAIMS, "The circuit of position: claims of posleak itself"),
    )
}

PAPERS: dict[str, Paper] = dict(_BUILT_IN)
"""Registered papers by name, in the order of display."""


def register(paper: Paper) -> None:
    """Register a paper; names of built-in papers are rejected, others may be registered again."""
    if paper.name == ALL or _BUILT_IN.get(paper.name, paper) != paper:
        raise InputError("name of a built-in paper", got=paper.name, remedy="choose another name")
    PAPERS[paper.name] = paper


def named_papers(name: str) -> tuple[str, ...]:
    """Return the papers that a name, or several separated by commas, stand for. Unknown names load the plugins.

    `all` stands for every paper, but not for the claims of posleak itself, whose circuit takes longer than all others.
    """
    if "," in name:
        return tuple(dict.fromkeys(paper for part in name.split(",") for paper in named_papers(part.strip())))
    if name not in PAPERS:
        load_plugins()
    if name == ALL:
        return tuple(paper for paper in PAPERS if paper != OWN_CLAIMS)
    if name not in PAPERS:
        raise InputError("unknown paper", where="--paper", got=name, remedy=did_you_mean(name, [*PAPERS, ALL]))
    return (name,)


class OfPaper(Protocol):
    """An item that belongs to a paper, or to none."""

    @property
    def paper(self) -> str | None: ...


Item = TypeVar("Item", bound=OfPaper)


def by_paper(items: Iterable[Item]) -> dict[str, list[Item]]:
    """Group items by the headings of their papers, in order of first occurrence.

    The heading of an unregistered paper, whose plugin is missing, is its name.
    """
    groups: dict[str, list[Item]] = {}
    for item in items:
        name = item.paper
        heading = OWN if name is None else PAPERS[name].heading if name in PAPERS else name
        groups.setdefault(heading, []).append(item)
    return groups
