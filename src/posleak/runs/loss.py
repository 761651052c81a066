"""Next-token loss of a run at its sampled positions: means over all of them and over three spans of the prompt.

    first    positions before 32: few tokens have been read
    middle   from there to the reference queries
    end      the reference queries: the last quarter

Each prompt gives the mean over its positions. Intervals are over prompts; runs on the same prompts are paired.
"""

from __future__ import annotations

from dataclasses import dataclass

import xarray as xr

from posleak.arrays import Array
from posleak.axes import EARLY, PROMPT
from posleak.leakage import Estimate, Jackknife, Sampled
from posleak.probe import Plan

LOSS, PREDICTED = "loss", "predicted_from"
"""The array, and its axis: positions from which the next token is predicted."""

LOSS_SPANS = ("all", "first", "middle", "end")
LOSS_UNIT = "nats per token"


def loss_positions(plan: Plan) -> list[int]:
    """Return the sampled positions that have a next token."""
    return [row for row in plan.rows if row < plan.length - 1]


def loss_by_prompt(data: xr.Dataset, plan: Plan) -> dict[str, Array]:
    """Return the mean loss of each prompt [B] over each span; spans without a sampled position are left out."""
    at, losses, late = data[PREDICTED].values, data[LOSS].values, plan.references[0]
    spans = {
        "all": at >= 0,
        "first": at < EARLY,
        "middle": (at >= EARLY) & (at < late),
        "end": at >= max(late, EARLY),
    }
    return {name: losses[:, span].mean(1) for name, span in spans.items() if span.any()}


@dataclass(frozen=True)
class Losses:
    """Mean loss with its interval, by span; `positions`: number of sampled positions of each prompt."""

    numbers: dict[str, Estimate]
    positions: int

    @classmethod
    def of(cls, data: xr.Dataset, plan: Plan) -> Losses | None:
        """Return the losses of a run; None if they were not measured."""
        if LOSS not in data:
            return None
        jackknife, means = Jackknife(data.sizes[PROMPT]), loss_by_prompt(data, plan)
        return cls({name: jackknife.mean(x).estimate for name, x in means.items()}, data.sizes[PREDICTED])

    def as_dict(self) -> dict[str, object]:
        return {**self.numbers, "positions": self.positions}


def loss_changes(after: xr.Dataset, before: xr.Dataset, plan: Plan) -> dict[str, Sampled]:
    """Return loss after minus loss before by span, paired by prompt; both runs must have read the same prompts."""
    one, other = loss_by_prompt(after, plan), loss_by_prompt(before, plan)
    jackknife = Jackknife(after.sizes[PROMPT])
    return {name: jackknife.mean(one[name] - other[name]) for name in one if name in other}
