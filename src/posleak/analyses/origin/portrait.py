"""The portrait: what the model makes of every token that stands first. Does the map pull them all to one direction?

One-token sequences, so thousands are cheap. By depth, over the tokens of a seeded draw from the ordinary vocabulary:
norms, the cosine to the reference token (the BOS), the mean cosine among them, whether the same channels are massive,
and a flat picture (the first two principal components of the directions).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from posleak.inputs import Vocabulary
from posleak.inputs.randomness import SEED_LIMIT, draw
from posleak.leakage import Estimate, Jackknife

from .cosines import joined_cosines, pair_cosine, resultant
from .states import Alone, unit
from .trajectory import TOP, Scale, is_massive

QUANTILES = (0.05, 0.5, 0.95)


def ordinary_tokens(
    vocabulary: Vocabulary, count: int, seed: int, without: int | None = None
) -> Int64[np.ndarray, "n"]:
    """The first n = `count` different ids of an endless draw; all ordinary ids if there are not more.

    The draw is inputs' own (`stream.draw`), under an index that no prompt has. A longer list starts with the shorter.
    """
    allowed = vocabulary.allowed
    allowed = allowed[allowed != without] if without is not None else allowed
    wanted, asked = min(count, len(allowed)), count
    if wanted == 0:
        return np.empty(0, dtype=np.int64)
    while True:
        drawn = allowed[draw(seed, SEED_LIMIT - 1, asked, len(allowed))]
        _, first = np.unique(drawn, return_index=True)
        if len(first) >= wanted:
            return np.asarray(drawn[np.sort(first)[:wanted]], dtype=np.int64)
        asked *= 2


@dataclass(frozen=True)
class Portrait:
    """n tokens at depths 0 … L.

    norm, cosine     5%, 50% and 95% quantiles over tokens of ‖x‖, and of the cosine to the reference token
    to_reference     [J]  mean cosine to the reference token
    among            [J]  mean cosine over pairs of tokens;  resultant: ‖mean direction‖
    top, top_share   the channel that is the largest for most tokens, and for which share of them
    massive_share    share of tokens with a massive channel
    overlap          mean overlap |A ∩ B| / TOP of the TOP largest channels with those of the reference token
    picture          directions on their first two principal components, the reference token first
    explained        share of the directions' variance on each
    """

    tokens: Int64[np.ndarray, "n"]
    reference: int
    norm: Float64[np.ndarray, "quantiles=3 J"]
    cosine: Float64[np.ndarray, "quantiles=3 J"]
    to_reference: Estimate
    among: Estimate
    resultant: Float64[np.ndarray, "J"]
    top: Int64[np.ndarray, "J"]
    top_share: Float64[np.ndarray, "J"]
    massive_share: Float64[np.ndarray, "J"]
    overlap: Float64[np.ndarray, "J"]
    picture: Float64[np.ndarray, "n+1 J 2"]
    explained: Float64[np.ndarray, "J 2"]

    @classmethod
    def of(cls, single: Alone, scale: Scale) -> Portrait:
        """The first of the one-token sequences is the reference token; the others are the sample."""
        depths = [single.states[:, d] for d in range(single.states.shape[1])]
        jackknife = Jackknife(len(single.tokens) - 1)
        u = map(unit, depths)  # one depth at a time: all of them are several times the states
        found = [(x[1:] @ x[0], pair_cosine(x[1:], jackknife), resultant(x[1:]), picture(x)) for x in u]
        cosines, each, resultants, pictures = zip(*found, strict=True)
        cosine = torch.stack(cosines, dim=1).numpy()  # [n, J]
        among, _ = joined_cosines(each, jackknife)
        channels = [_channels(x, float(entry)) for x, entry in zip(depths, scale.entry, strict=True)]
        top, top_share, massive, overlap = (np.array(column) for column in zip(*channels, strict=True))
        norms = torch.stack([x[1:].double().norm(dim=-1) for x in depths], dim=1).numpy()
        return cls(
            tokens=single.tokens[1:].numpy(),
            reference=int(single.tokens[0]),
            norm=np.quantile(norms, QUANTILES, axis=0),
            cosine=np.quantile(cosine, QUANTILES, axis=0),
            to_reference=jackknife.mean(cosine).estimate,
            among=among,
            resultant=np.array(resultants),
            top=top, top_share=top_share, massive_share=massive, overlap=overlap,
            picture=np.stack([flat for flat, _ in pictures], axis=1),
            explained=np.stack([share for _, share in pictures]),
        )  # fmt: skip

    def as_dict(self) -> dict[str, Any]:
        """Without the picture: `Origin` keeps it as an array."""
        names = ("norm", "cosine", "to_reference", "among", "resultant", "top", "top_share", "massive_share",
                 "overlap", "explained")  # fmt: skip
        found = {name: getattr(self, name) for name in names}
        return {"n": len(self.tokens), "reference": self.reference, "quantiles": list(QUANTILES), **found}


def _channels(x: Float[Tensor, "tokens W"], entry: float) -> tuple[int, float, float, float]:
    """Modal largest channel, its share, share of tokens with a massive one, overlap with the reference's largest."""
    k = min(TOP, x.shape[-1])
    order = x.abs().topk(k, dim=-1).indices  # [n + 1, k]
    counts = torch.bincount(order[1:, 0])
    top, n = int(counts.argmax()), len(x) - 1
    shared = (order[1:, :, None] == order[0]).any(-1).double().mean()
    massive = is_massive(x[1:], entry).any(-1).double().mean()
    return top, float(counts[top]) / n, float(massive), float(shared)


def picture(u: Float64[Tensor, "n W"]) -> tuple[Float64[np.ndarray, "n 2"], Float64[np.ndarray, "2"]]:
    """The rows of u on their first two principal components, and the shares of variance there.

    The sign of a component is that of its largest entry, so that the picture does not turn over between machines.
    """
    centred = u - u.mean(0)
    n, width = centred.shape
    if width <= n:
        values, vectors = torch.linalg.eigh(centred.mT @ centred)
        axes = vectors[:, -2:].flip(-1)
        flat = centred @ axes
    else:
        values, vectors = torch.linalg.eigh(centred @ centred.mT)
        flat = vectors[:, -2:].flip(-1) * values[-2:].flip(0).clamp(min=0).sqrt()
    largest = flat.gather(0, flat.abs().argmax(0, keepdim=True))
    share = values[-2:].flip(0).clamp(min=0) / values.clamp(min=0).sum().clamp(min=torch.finfo(values.dtype).tiny)
    return (flat * torch.where(largest < 0, -1.0, 1.0)).numpy(), share.numpy()
