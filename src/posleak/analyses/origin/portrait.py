"""The portrait: the states of many first tokens. Do the layers map all of them to one direction?

One-token sequences are cheap, so thousands can be compared. By depth, over a seeded draw from the ordinary
vocabulary: norms, cosines to the reference token (the BOS) and among the tokens, agreement of the largest channels,
and a two-dimensional picture (the first two principal components of the directions).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posleak.arrays import Array
from posleak.inputs import Vocabulary
from posleak.inputs.bodies import SEED_LIMIT, draw
from posleak.leakage import Estimate, Jackknife

from .directions import joined_cosines, pair_cosine, resultant, unit
from .states import Alone
from .trajectory import TOP, BodyScale, is_massive

QUANTILES = (0.05, 0.5, 0.95)


def ordinary_tokens(
    vocabulary: Vocabulary, count: int, seed: int, without: int | None = None
) -> Int64[np.ndarray, "n"]:
    """Return the first n = `count` different ids of an endless random draw, or all ordinary ids if there are fewer.

    The draw is `inputs.draw` with an index that no prompt has. A longer list starts with the shorter one.
    """
    allowed = vocabulary.allowed
    allowed = allowed[allowed != without] if without is not None else allowed
    wanted, draws = min(count, len(allowed)), count
    if wanted == 0:
        return np.empty(0, dtype=np.int64)
    while True:
        drawn = allowed[draw(seed, SEED_LIMIT - 1, draws, len(allowed))]
        _, first = np.unique(drawn, return_index=True)
        if len(first) >= wanted:
            return np.asarray(drawn[np.sort(first)[:wanted]], dtype=np.int64)
        draws *= 2


@dataclass(frozen=True)
class Portrait:
    """n first tokens at depths 0 … L.

    norm, cosine     [3, J]  QUANTILES over tokens of ‖x‖, and of the cosine to the reference token
    to_reference     [J]  mean cosine to the reference token
    among            [J]  mean cosine over pairs of tokens
    resultant        [J]  ‖mean direction‖
    top, top_share   [J]  the channel that is largest for most tokens, and the share of tokens for which it is
    massive_share    [J]  share of tokens with a massive channel
    overlap          [J]  mean overlap |A ∩ B| / TOP of the TOP largest channels with those of the reference token
    explained        [J, 2]  share of the directions' variance on the first two principal components
    picture          [n + 1, J, 2]  directions on these components, the reference token first; not part of the JSON
    """

    n: int
    reference: int
    quantiles: tuple[float, ...]
    norm: Array
    cosine: Array
    to_reference: Estimate
    among: Estimate
    resultant: Array
    top: tuple[int, ...]
    top_share: Array
    massive_share: Array
    overlap: Array
    explained: Array
    tokens: tuple[int, ...] = ()
    picture: Array = field(default_factory=lambda: np.empty(0))

    @classmethod
    def of(cls, single: Alone, body: BodyScale) -> Portrait:
        """Describe one-token sequences; the first is the reference token, the others are the sample."""
        depths = [single.states[:, d] for d in range(single.states.shape[1])]
        jackknife = Jackknife(len(single.tokens) - 1)
        u = map(unit, depths)  # one depth at a time: in float64 all of them take several times the memory of the states
        columns = [(x[1:] @ x[0], pair_cosine(x[1:], jackknife), resultant(x[1:]), picture(x)) for x in u]
        cosines, pairs, resultants, pictures = zip(*columns, strict=True)
        cosine = torch.stack(cosines, dim=1).numpy()  # [n, J]
        among, _ = joined_cosines(pairs, jackknife)
        channels = [_channels(x, float(entry)) for x, entry in zip(depths, body.median_entry, strict=True)]
        top, top_share, massive, overlap = zip(*channels, strict=True)
        norms = torch.stack([x[1:].double().norm(dim=-1) for x in depths], dim=1).numpy()
        return cls(
            n=len(single.tokens) - 1, reference=int(single.tokens[0]), quantiles=QUANTILES,
            norm=np.quantile(norms, QUANTILES, axis=0), cosine=np.quantile(cosine, QUANTILES, axis=0),
            to_reference=jackknife.mean(cosine).estimate, among=among, resultant=np.array(resultants),
            top=top, top_share=np.array(top_share), massive_share=np.array(massive), overlap=np.array(overlap),
            explained=np.stack([share for _, share in pictures]), tokens=tuple(single.tokens[1:].tolist()),
            picture=np.stack([flat for flat, _ in pictures], axis=1),
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object, without the tokens and their picture."""
        return {name: value for name, value in vars(self).items() if name not in ("tokens", "picture")}


def _channels(x: Float[Tensor, "tokens W"], entry: float) -> tuple[int, float, float, float]:
    """Return `top`, `top_share`, `massive_share` and `overlap` of one depth (see Portrait)."""
    k = min(TOP, x.shape[-1])
    order = x.abs().topk(k, dim=-1).indices  # [n + 1, k]
    counts = torch.bincount(order[1:, 0])
    top, n = int(counts.argmax()), len(x) - 1
    shared = (order[1:, :, None] == order[0]).any(-1).double().mean()
    massive = is_massive(x[1:], entry).any(-1).double().mean()
    return top, float(counts[top]) / n, float(massive), float(shared)


def picture(u: Float64[Tensor, "n W"]) -> tuple[Float64[np.ndarray, "n 2"], Float64[np.ndarray, "2"]]:
    """Project the rows of u on their first two principal components; return them and their shares of the variance.

    The sign of a component is that of its largest entry, so that the picture is not mirrored on another machine.
    """
    centred = u - u.mean(0)
    n, width = centred.shape
    if width <= n:
        values, vectors = torch.linalg.eigh(centred.mT @ centred)
        flat = centred @ vectors[:, -2:].flip(-1)
    else:
        values, vectors = torch.linalg.eigh(centred @ centred.mT)
        flat = vectors[:, -2:].flip(-1) * values[-2:].flip(0).clamp(min=0).sqrt()
    largest = flat.gather(0, flat.abs().argmax(0, keepdim=True))
    share = values[-2:].flip(0).clamp(min=0) / values.clamp(min=0).sum().clamp(min=torch.finfo(values.dtype).tiny)
    return (flat * torch.where(largest < 0, -1.0, 1.0)).numpy(), share.numpy()
