"""The fingerprint: W_h v_0, what a sink-reading head writes, across inputs.

same       1 − cos over pairs of prompts that share their first token only: 0 to rounding (position 0 is closed)
different  mean cosine over pairs of first tokens, from one-token sequences; intervals over tokens
carried    ‖x' − x‖ / ‖x‖ in the last quarter of a prompt, by depth, when nothing but its first token is changed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from posleak.leakage import Estimate, Jackknife, Sampled

from .cosines import joined_cosines, pair_cosine
from .projection import Projection
from .states import unit


@dataclass(frozen=True)
class Fingerprint:
    """Sink-reading heads in the order of `heads` = (call, head).

    same       largest 1 − cos over pairs of `prompts` prompts with the same first token
    different  [heads]  mean cosine over pairs of n first tokens;  overall: mean over heads
    matrices   cosines among the first few first tokens, the reference token first (for the report)
    carried    [J]  mean over prompts of the relative difference at late positions
    changed    what stood first in the two versions of each prompt
    """

    heads: tuple[tuple[int, int], ...]
    same: Float64[np.ndarray, "heads"]
    different: Estimate
    overall: Estimate
    matrices: Float64[np.ndarray, "heads shown shown"]
    carried: Estimate
    changed: Int64[np.ndarray, "B 2"]
    prompts: int

    @property
    def worst(self) -> float | None:
        """The largest 1 − cos of all heads; None without a sink-reading head."""
        return float(self.same.max()) if len(self.same) else None

    def as_dict(self) -> dict[str, Any]:
        records = [
            {"call": c, "head": h, "same": self.same[k], "different": self.different[k]}
            for k, (c, h) in enumerate(self.heads)
        ]
        return {
            "same": {"worst": self.worst, "n": self.prompts}, "different": self.overall,
            "carried": self.carried, "changed": self.changed, "heads": records,
        }  # fmt: skip


SHOWN = 16
"""Rows and columns of the cosine matrices that are kept."""

FINGERPRINT_TOKENS = 256
"""First tokens whose fingerprints are compared, besides the reference token."""


def written(
    projection: Projection, values: Float[Tensor, "n K Ev"], heads: Sequence[int]
) -> Float64[Tensor, "{len(heads)} n W"]:
    """W_h v_0, with the gain that follows W_O where there is one."""
    weight, group = projection.weight().double(), projection.heads // values.shape[1]
    return torch.stack([values[:, h // group].double() @ weight[h] for h in heads])


def fingerprint(
    found: Sequence[Projection],
    readers: Bool[np.ndarray, "L H"],
    same: Sequence[Float[Tensor, "prompts _K _Ev"]],
    different: Sequence[Float[Tensor, "n _K _Ev"]],
    carried: Float64[np.ndarray, "B J"],
    changed: Int64[np.ndarray, "B 2"],
) -> Fingerprint:
    """same, different: for each call v_0, of prompts with one first token, and of n tokens.

    carried: relative differences of each prompt.
    """
    names, gaps, cosines, matrices = list[tuple[int, int]](), list[float](), list[Sampled](), list[Tensor]()
    jackknife = Jackknife(len(different[0]) - 1)
    for projection, row, alike, others in zip(found, readers, same, different, strict=True):
        heads = np.flatnonzero(row).tolist()
        names += [(projection.call, head) for head in heads]
        if not heads:
            continue
        u = unit(written(projection, alike, heads))
        gaps += [float(x) for x in (1 - u @ u.mT).flatten(1).max(-1).values]
        spread = written(projection, others, heads)
        shown = unit(spread[:, :SHOWN])
        cosines += [pair_cosine(one, jackknife) for one in spread[:, 1:]]  # at once: directions of all calls are many
        matrices += list(shown @ shown.mT)
    each, overall = joined_cosines(cosines, jackknife)
    return Fingerprint(
        heads=tuple(names), same=np.array(gaps), different=each, overall=overall,
        matrices=torch.stack(matrices).numpy() if matrices else np.zeros((0, 0, 0)),
        carried=Jackknife(len(carried)).mean(carried).estimate, changed=changed, prompts=len(same[0]),
    )  # fmt: skip


def carried_difference(
    x: Sequence[Float[Tensor, "B T _W"]], other: Sequence[Float[Tensor, "B T _W"]]
) -> Float64[np.ndarray, "B J={len(x)}"]:
    """Mean over the last quarter of positions of ‖x' − x‖ / ‖x‖, from states at every depth."""
    late = slice(3 * x[0].shape[1] // 4, None)
    gaps = [
        ((b[:, late].float() - a[:, late].float()).norm(dim=-1) / a[:, late].float().norm(dim=-1)).mean(-1)
        for a, b in zip(x, other, strict=True)
    ]
    return torch.stack([gap.cpu().double() for gap in gaps], dim=1).numpy()
