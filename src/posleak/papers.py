"""The papers whose claims can be tested, by the names that `--paper` takes.

They are known without torch, so that a wrong name is refused at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from posleak.errors import InputError, did_you_mean
from posleak.plugins import load_plugins

POSITION, SINKS, WAVELETS = "position", "sinks", "wavelets"
ALL = "all"
"""In the place of a name: every paper."""

OWN = "claims of your own"
"""What claims are called that name no paper."""


@dataclass(frozen=True)
class Paper:
    """`name`: what it is called on the command line; `arxiv`: its number there, if it has one."""

    name: str
    title: str
    arxiv: str | None = None

    @property
    def heading(self) -> str:
        """`Title (arXiv 2606.06160)`"""
        return self.title if self.arxiv is None else f"{self.title} (arXiv {self.arxiv})"


_BUILT_IN = {
    paper.name: paper
    for paper in (
        Paper(POSITION, "Where does Absolute Position come from in decoder-only Transformers?", "2606.06160"),
        Paper(SINKS, "What are you sinking? A geometric approach on attention sink", "2508.02546"),
        Paper(WAVELETS, "Beyond Position: the emergence of wavelet-like properties in Transformers", "2410.18067"),
    )
}

PAPERS: dict[str, Paper] = dict(_BUILT_IN)
"""The registry, by name, in the order in which papers are shown."""


def register(paper: Paper) -> None:
    """Add a paper; a name that posleak uses itself is refused, and one of a plugin's may be registered again."""
    if paper.name == ALL or _BUILT_IN.get(paper.name, paper) != paper:
        raise InputError("posleak uses this name for a paper itself", got=paper.name, remedy="choose another name")
    PAPERS[paper.name] = paper


def named_papers(name: str) -> tuple[str, ...]:
    """The papers that a name stands for: itself, or every one if it is `all`. Plugins are asked for an unknown name."""
    if name not in PAPERS:
        load_plugins()
    if name == ALL:
        return tuple(PAPERS)
    if name not in PAPERS:
        raise InputError("no paper of this name", where="--paper", got=name, remedy=did_you_mean(name, [*PAPERS, ALL]))
    return (name,)


class OfPaper(Protocol):
    """What belongs to a paper, or to none."""

    @property
    def paper(self) -> str | None: ...


Item = TypeVar("Item", bound=OfPaper)


def by_paper(items: Iterable[Item]) -> dict[str, list[Item]]:
    """In groups, by the headings of their papers, in the order in which these first occur.

    A paper that is not registered here, since its plugin is missing, is called by its name.
    """
    groups: dict[str, list[Item]] = {}
    for item in items:
        name = item.paper
        heading = OWN if name is None else PAPERS[name].heading if name in PAPERS else name
        groups.setdefault(heading, []).append(item)
    return groups
