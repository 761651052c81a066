"""The states of position 0, from one-token sequences: the trajectory of one token, and the portrait of many.

The trajectory is x_0 of the reference token (the BOS) at every depth.

    massive    |x| > 100 and ≥ 1000 × the median |x| of body states at this depth (Sun et al. 2024)
    middle     the direction of x_0 at the middle depth, J/2 of J depths
    settles    the first depth of the unbroken run up to the middle with cos(x_0, middle) > 0.99
    leaves     the last depth of the unbroken run after the middle with cos(x_0, middle) > 0.99
    jump       the depth at which the norm grows by the largest factor over the previous depth

Scales are those of body states (positions ≥ 1 of random prompts).

The portrait asks whether the layers map all first tokens to one direction. One-token sequences are cheap, so thousands
can be compared. By depth, over a seeded draw from the ordinary vocabulary: norms, cosines to the reference token and
among the tokens, agreement of the largest channels, and a two-dimensional picture (the first two principal components
of the directions).

    c = mean over pairs of different directions of u_a · u_b = ( ‖Σ_a u_a‖² − n ) / ( n (n − 1) )

The mean cosine c is 1 if all directions are equal and has expectation 0 for random directions. It is the unbiased
counterpart of the resultant length R = ‖mean u‖ (R² is 1/n too large for random directions), and it is computed
without the n × n matrix of cosines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int64
from torch import Tensor

from posleak.arrays import Array
from posleak.errors import UnsupportedError
from posleak.inputs import Vocabulary
from posleak.inputs.bodies import SEED_LIMIT, draw
from posleak.leakage import Estimate, Jackknife, Sampled, combined
from posleak.leakage.power import NEIGHBOURS, prompt_pairs

from .states import Alone, WithArrays

ABSOLUTE, RELATIVE = 100.0, 1000.0
SETTLED = 0.99
TOP = 4
QUANTILES = (0.05, 0.5, 0.95)


def unit(x: Float[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """Return x / ‖x‖ along the last axis; a zero vector stays zero."""
    x = x.double()
    norm: Tensor = x.norm(dim=-1, keepdim=True)
    return x / norm.clamp(min=torch.finfo(torch.float64).tiny)


def _directions(x: Float[Tensor, "n W"]) -> Float64[Tensor, "n W"]:
    """Return the unit rows of x, or NaN everywhere if a row is zero."""
    u = unit(x)
    return torch.full_like(u, torch.nan) if bool((u.square().sum(-1) < 0.5).any()) else u


def mean_cosine(x: Float[Tensor, "n W"]) -> float:
    """Return the mean cosine over pairs of different rows; NaN if a row is zero."""
    u, n = _directions(x), len(x)
    return (float(u.sum(0).square().sum()) - n) / (n * (n - 1)) if n > 1 else float("nan")


def resultant(x: Float[Tensor, "n W"]) -> float:
    """Return R = ‖mean of the unit rows‖."""
    return float(unit(x).mean(0).norm())


def pair_cosine(x: Float[Tensor, "n W"], jackknife: Jackknife) -> Sampled:
    """Return the mean cosine over pairs of different rows, with jackknife replicates; NaN if a row is zero."""
    u = _directions(x)
    with_others = 2 * (u @ u.sum(0) - u.square().sum(-1))
    sides = (torch.from_numpy(side).chunk(NEIGHBOURS) for side in prompt_pairs(jackknife.prompts))
    together = torch.cat([2 * (u[first] * u[second]).sum(-1) for first, second in zip(*sides, strict=True)])
    return jackknife.of_sums(np.array(mean_cosine(u)), with_others.numpy(), together.numpy())


def joined_cosines(cosines: Sequence[Sampled], jackknife: Jackknife) -> tuple[Estimate, Estimate]:
    """Return mean cosines as one estimate with a cell for each, and their paired mean."""
    if not cosines:
        empty, nan = np.zeros(0), np.array(np.nan)
        return Estimate(empty, empty, empty, jackknife.prompts), Estimate(nan, nan, nan, jackknife.prompts)
    stacked = combined(lambda *values: np.stack(values, axis=-1), *cosines)
    with np.errstate(invalid="ignore"):  # with fewer than FEWEST rows, replicates are infinite and there is no interval
        return stacked.estimate, combined(lambda values: values.mean(-1), stacked).estimate


@dataclass(frozen=True)
class BodyScale:
    """Scales of n body states, by depth [J].

    median_entry   median |x| over positions and channels
    median_norm    median ‖x‖ over positions
    alike          mean cosine over pairs of states, which is far from 0 in most models
    """

    median_entry: Array
    median_norm: Array
    alike: Array
    n: int

    @classmethod
    def of(cls, body: Sequence[Float[Tensor, "... _W"]]) -> BodyScale:
        """Compute the scales of body states at every depth."""
        flat = [x.flatten(0, -2).float() for x in body]
        entry = np.array([float(x.abs().flatten().median()) for x in flat])
        norm = np.array([float(x.norm(dim=-1).median()) for x in flat])
        return cls(entry, norm, np.array([mean_cosine(x) for x in flat]), len(flat[0]))


@dataclass(frozen=True)
class Dimension:
    """One channel of x_0: its value, and its share of ‖x_0‖²."""

    index: int
    value: float
    share: float
    massive: bool


@dataclass(frozen=True)
class Trajectory:
    """x_0 of `token` at depths 0 … L; arrays have one entry per depth [J].

    settles, leaves, jump   depths, as defined in this module
    norm, relative          ‖x_0‖, and ‖x_0‖ / median norm of body states
    step, final, middle     cosine to the previous depth (NaN at depth 0), to the last and to the middle depth
    dimensions              for each depth the massive channels, or the TOP largest if none is massive
    """

    token: int
    spelled: str | None
    settles: int
    leaves: int
    jump: int
    norm: Array
    relative: Array
    step: Array
    final: Array
    middle: Array
    dimensions: tuple[tuple[Dimension, ...], ...]
    body: BodyScale

    @classmethod
    def of(cls, x: Float[Tensor, "J W"], body: BodyScale, token: int, spelled: str | None) -> Trajectory:
        """Describe the states x of the one-token sequence."""
        u, norm = unit(x), x.double().norm(dim=-1).numpy()
        if not norm[len(norm) // 2] > 0:
            zero = ", ".join(map(str, np.flatnonzero(norm == 0)))
            raise UnsupportedError(
                "the state at position 0 is zero, so it has no direction", where="position 0",
                got=f"token {token}: x_0 = 0 at depth {zero} of 0 to {len(norm) - 1}", expected="a nonzero state",
                remedy="check the weights, those of embeddings and norms first; `posleak measure` and `posleak trace` "
                "do not need states",
            )  # fmt: skip
        middle = (u @ u[len(u) // 2]).numpy()
        settles, leaves = settled(middle)
        return cls(
            token=token, spelled=spelled, settles=settles, leaves=leaves,
            jump=1 + int(np.argmax(_ratio(norm[1:], norm[:-1], 0.0))),
            norm=norm, relative=_ratio(norm, body.median_norm, np.nan),
            step=np.concatenate([[np.nan], (u[1:] * u[:-1]).sum(-1).numpy()]),
            final=(u @ u[-1]).numpy(), middle=middle,
            dimensions=tuple(dimensions(*depth) for depth in zip(x, body.median_entry.tolist(), strict=True)),
            body=body,
        )  # fmt: skip


def _ratio(x: Float64[np.ndarray, "n"], y: Float64[np.ndarray, "n"], undefined: float) -> Float64[np.ndarray, "n"]:
    """Return x / y, and `undefined` where y is zero."""
    return np.asarray(np.divide(x, y, out=np.full_like(x, undefined), where=y > 0))


def settled(cosine: Float64[np.ndarray, "J"]) -> tuple[int, int]:
    """Return the first and last depth of the unbroken run above SETTLED around the middle depth (cosine 1)."""
    middle = len(cosine) // 2
    outside = np.flatnonzero(~(cosine > SETTLED))
    before, after = outside[outside < middle], outside[outside > middle]
    first = int(before[-1]) + 1 if len(before) else 0
    return first, int(after[0]) - 1 if len(after) else len(cosine) - 1


def is_massive(x: Float[Tensor, "*shape"], entry: float) -> Bool[Tensor, "*shape"]:
    """Apply the rule of Sun et al. with the median |x| of the depth."""
    return (x.abs() > ABSOLUTE) & (x.abs() >= RELATIVE * entry)


def dimensions(x: Float[Tensor, "W"], entry: float) -> tuple[Dimension, ...]:
    """Return the massive channels of one state, largest first, or its TOP largest if none is massive."""
    massive = is_massive(x, entry)
    count = int(massive.sum()) or min(TOP, len(x))
    squared_norm = float(x.double().square().sum()) or 1.0
    order = torch.argsort(x.abs(), descending=True, stable=True)[:count]
    return tuple(
        Dimension(int(at), float(x[at]), float(x[at].double() ** 2) / squared_norm, bool(massive[at])) for at in order
    )


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
class Portrait(WithArrays):
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
    tokens: tuple[int, ...] = field(default=(), repr=False)
    picture: Array = field(default_factory=lambda: np.empty(0), repr=False)

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
