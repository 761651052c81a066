"""The fingerprint: W_h v_0, the vector written by a sink-reading head, compared across inputs.

same       1 − cos over pairs of prompts that share only their first token: 0 up to rounding (position 0 is closed)
different  mean cosine over pairs of first tokens, from one-token sequences; intervals over tokens
carried    ‖x' − x‖ / ‖x‖ in the last quarter of a prompt, by depth, if only the first token is changed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from posleak.arrays import Array
from posleak.leakage import Estimate, Jackknife, Sampled
from posleak.typed import Number

from .directions import joined_cosines, pair_cosine, unit
from .projection import Projection

SHOWN = 16
"""Rows and columns of the stored cosine matrices."""

FINGERPRINT_TOKENS = 256
"""First tokens whose fingerprints are compared, in addition to the reference token."""


@dataclass(frozen=True)
class HeadFingerprint:
    """One sink-reading head.

    same        largest 1 − cos over pairs of prompts with the same first token
    different   mean cosine over pairs of different first tokens
    """

    call: int
    head: int
    same: Number
    different: Estimate


@dataclass(frozen=True)
class SameToken:
    """The largest 1 − cos of all heads over n prompts with the same first token; None without a sink-reading head."""

    worst: float | None
    n: int


@dataclass(frozen=True)
class Fingerprint:
    """Fingerprints of all sink-reading heads.

    different  mean over heads of `HeadFingerprint.different`
    carried    [J]  mean over prompts of the relative difference at late positions
    changed    the first tokens of the two versions of each prompt
    matrices   [heads, SHOWN, SHOWN]  cosines among some first tokens, the reference token first; not part of the JSON
    """

    same: SameToken
    different: Estimate
    carried: Estimate
    changed: tuple[tuple[int, int], ...]
    heads: tuple[HeadFingerprint, ...]
    matrices: Array = field(default_factory=lambda: np.empty(0))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object, without the matrices."""
        return {name: value for name, value in vars(self).items() if name != "matrices"}


def written(
    projection: Projection, values: Float[Tensor, "n K Ev"], heads: Sequence[int]
) -> Float64[Tensor, "{len(heads)} n W"]:
    """Return W_h v_0, including the gain that follows W_O if there is one."""
    weight, group = projection.weight().double(), projection.heads // values.shape[1]
    return torch.stack([values[:, h // group].double() @ weight[h] for h in heads])


def fingerprint(
    projections: Sequence[Projection],
    readers: Bool[np.ndarray, "L H"],
    same: Sequence[Float[Tensor, "prompts _K _Ev"]],
    different: Sequence[Float[Tensor, "n _K _Ev"]],
    carried: Float64[np.ndarray, "B J"],
    changed: Int64[np.ndarray, "B 2"],
) -> Fingerprint:
    """Compare the fingerprints of the sink-reading heads.

    same, different   v_0 for each call, of prompts with one first token and of n different first tokens
    carried           relative differences of each prompt
    changed           the first tokens of the two versions of each prompt
    """
    names, gaps, cosines, matrices = list[tuple[int, int]](), list[float](), list[Sampled](), list[Tensor]()
    jackknife = Jackknife(len(different[0]) - 1)
    for projection, row, same_values, different_values in zip(projections, readers, same, different, strict=True):
        heads = np.flatnonzero(row).tolist()
        names += [(projection.call, head) for head in heads]
        if not heads:
            continue
        u = unit(written(projection, same_values, heads))
        gaps += [float(x) for x in (1 - u @ u.mT).flatten(1).max(-1).values]
        directions = written(projection, different_values, heads)
        shown = unit(directions[:, :SHOWN])
        cosines += [pair_cosine(x, jackknife) for x in directions[:, 1:]]  # now: keeping all calls takes much memory
        matrices += list(shown @ shown.mT)
    by_head, overall = joined_cosines(cosines, jackknife)
    return Fingerprint(
        same=SameToken(float(np.max(gaps)) if gaps else None, len(same[0])), different=overall,
        carried=Jackknife(len(carried)).mean(carried).estimate,
        changed=tuple((int(own), int(other)) for own, other in changed),
        heads=tuple(HeadFingerprint(*name, gaps[k], by_head[k]) for k, name in enumerate(names)),
        matrices=torch.stack(matrices).numpy() if matrices else np.zeros((0, 0, 0)),
    )  # fmt: skip


def carried_difference(
    x: Sequence[Float[Tensor, "B T _W"]], other: Sequence[Float[Tensor, "B T _W"]]
) -> Float64[np.ndarray, "B J={len(x)}"]:
    """Return the mean over the last quarter of positions of ‖x' − x‖ / ‖x‖, at every depth."""
    late = slice(3 * x[0].shape[1] // 4, None)
    gaps = [
        ((b[:, late].float() - a[:, late].float()).norm(dim=-1) / a[:, late].float().norm(dim=-1)).mean(-1)
        for a, b in zip(x, other, strict=True)
    ]
    return torch.stack([gap.cpu().double() for gap in gaps], dim=1).numpy()
