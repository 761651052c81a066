"""Scale logits by position: `scale=logn` multiplies those of query i by log(i + 1) / log(N) (scalable softmax)."""

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
    """Multiply query i by log(i + 1) / log(N), so that attention does not flatten with the number of keys.

    Nakanishi 2025, with the trained factor s replaced by 1 / log N. N: `reference`, or the prompt's length if it is 0.
    """

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
        """Return the factors by position. Query 0, which sees itself only, is not scaled."""
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
        "logits: those of the query at position i are multiplied by log(i + 1) / log(N); N is by default the length of "
        "the prompt. This is scalable softmax (Nakanishi 2025, arXiv 2501.19399) with its trained factor replaced by "
        "1 / log(N), so that a query with N keys is unchanged. The effect of the factors on leakage is reported "
        "separately as `scaling`",
        "a second edit of the logits; `context`, where queries see other numbers of keys", "scale=logn:512", _make,
    )
)  # fmt: skip
