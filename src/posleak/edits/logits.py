"""Logits scaled by position: `scale=logn` multiplies those of query i by log(i + 1) / log(N) (scalable softmax)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from .base import EditKind, NamedEdit, Site, register
from .scope import Scope

if TYPE_CHECKING:
    from torch import Tensor

    from posleak.probe import Call


@dataclass(frozen=True)
class LogScale(NamedEdit):
    """Query i times log(i + 1) / log(N), so that attention does not flatten as keys become more (Nakanishi 2025, with
    the trained factor s replaced by 1 / log N). N: `reference`, or the length of the prompt if that is 0."""

    reference: int = 0

    site: ClassVar[Site] = Site.LOGITS

    @property
    def text(self) -> str:
        return "scale=logn" + (f":{self.reference}" if self.reference else "")

    def edit(self, call: Call) -> Call:
        factors = self.factors(range(call.query.shape[2]), call.query.shape[2])
        return replace(call, query=call.query * factors.to(call.query)[:, None])

    def temperature(self, rows: Sequence[int], length: int) -> Tensor:
        return self.factors(rows, length)

    def factors(self, rows: Sequence[int], length: int) -> Tensor:
        """By position. Query 0 sees itself only, whatever its logits are; it is left alone."""
        import torch

        seen = torch.tensor(list(rows), dtype=torch.float64) + 1
        return torch.where(seen > 1, seen.log() / math.log(self.reference or length), 1.0)


def _make(value: str, scope: Scope) -> LogScale:
    kind, colon, number = value.partition(":")
    if kind != "logn" or (colon and not (number.isdecimal() and int(number) > 1)):
        raise ValueError(value)
    return LogScale(int(number) if colon else 0)


register(
    EditKind(
        "scale", "scale=logn[:N]",
        "logits: those of the query at position i are multiplied by log(i + 1) / log(N), N being the length of the "
        "prompt if it is left out. Scalable softmax (Nakanishi 2025, arXiv 2501.19399) with its trained factor "
        "replaced by 1 / log(N), so that the query with N keys is left as it is. What the factors themselves do to "
        "leakage is told apart as `scaling`",
        "a second edit of the logits; `context`, where queries see other numbers of keys", "scale=logn:512", _make,
    )
)  # fmt: skip
