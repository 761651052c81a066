"""Next-token loss of a run, at its sampled positions: means over the first 32 tokens, the middle and the end.

    first    positions before 32: few tokens have been read
    middle   from there to the reference queries
    end      the reference queries, the last quarter

Each prompt gives the mean over its positions, and intervals are over prompts; runs on the same prompts are paired.
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

WHERE = ("all", "first", "middle", "end")
UNIT = "nats per token"


def positions(plan: Plan) -> list[int]:
    """Positions whose loss is taken: the sampled ones that have a next token."""
    return [row for row in plan.rows if row < plan.length - 1]


def labelled(losses: Array) -> xr.Variable:
    """Losses [B, P] for the run's dataset."""
    return xr.Variable((PROMPT, PREDICTED), losses, {"units": UNIT})


def by_prompt(data: xr.Dataset, plan: Plan) -> dict[str, Array]:
    """Mean loss of each prompt [B], over all sampled positions and over those of each part; parts without any are left
    out."""
    at, losses = data[PREDICTED].values, data[LOSS].values
    late = plan.references[0]
    parts = {
        "all": at >= 0,
        "first": at < EARLY,
        "middle": (at >= EARLY) & (at < late),
        "end": at >= max(late, EARLY),
    }
    return {name: losses[:, there].mean(1) for name, there in parts.items() if there.any()}


@dataclass(frozen=True)
class Losses:
    """Mean loss with its interval, by part (WHERE); `positions`: how many of each prompt."""

    numbers: dict[str, Estimate]
    positions: int

    @classmethod
    def of(cls, data: xr.Dataset, plan: Plan) -> Losses | None:
        """None if the run was measured without."""
        if LOSS not in data:
            return None
        found = by_prompt(data, plan)
        jackknife = Jackknife(data.sizes[PROMPT])
        return cls({name: jackknife.mean(x).estimate for name, x in found.items()}, data.sizes[PREDICTED])

    def as_dict(self) -> dict[str, object]:
        return {**self.numbers, "positions": self.positions}


def changes(after: xr.Dataset, before: xr.Dataset, plan: Plan) -> dict[str, Sampled]:
    """Loss after minus loss before, by part, paired: both must have read the same prompts."""
    one, other = by_prompt(after, plan), by_prompt(before, plan)
    jackknife = Jackknife(after.sizes[PROMPT])
    return {name: jackknife.mean(one[name] - other[name]) for name in one if name in other}
