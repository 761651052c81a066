"""The directions of the residual stream that carry position, fitted on separate prompts.

With h_b(p) the stream of prompt b at one depth and position p ≥ m, and μ₁, μ₂ its means over two halves of the prompts,

    c     mean of h over positions and prompts
    C     = ½ Σ_p [ (μ₁(p) − c₁)(μ₂(p) − c₂)ᵀ + (μ₂(p) − c₂)(μ₁(p) − c₁)ᵀ ] / P       cross-half covariance
    V     eigenvectors of C with the largest eigenvalues, the positional directions
    a(p)  = (μ(p) − c) V, the coefficients at each position

The halves share no prompt, so that their noise does not add to C. Each direction has the sign for which its coefficient
increases with the position.

LEACE (least-squares concept erasure in closed form, Belrose et al. 2023, arXiv 2306.03819) removes all that a linear
probe can read of a concept z, here the one-hot position:

    h ← c + (I − W⁺ U Uᵀ W)(h − c),   W = Σxx^{−½},   U: left singular vectors of W Σxz

With random orthonormal U in the span of the whitened states instead, it is the control of LEACE.

Sums are in float64. Their size does not depend on the number of prompts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from posleak.arrays import Array
from posleak.defaults import TOKENS_AT_ONCE
from posleak.errors import UnsupportedError
from posleak.inputs import Prompts, prepare
from posleak.inputs.bodies import SEED_LIMIT, GivenBody
from posleak.models import input_device
from posleak.probe import Collector, Probe, attach
from posleak.probe.attachment import decoder_layers
from posleak.stopwatch import stage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from posleak.models import Subject
    from posleak.probe import Call

FIT_TOKENS, FIT_PROMPTS = 8192, (16, 64)
"""Tokens of a fit, and its smallest and largest number of prompts: the error of a direction depends on the tokens."""

FIT_SEED = 2_718_281_828
"""Offset of the seed of a fit's prompts from the seed of the run."""

MAX_DIRECTIONS = 8
"""Number of positional directions that a fit keeps."""


@dataclass(frozen=True)
class Leace:
    """LEACE by depth: h − c ↦ h − c − out readᵀ (h − c).

    out, read                 W⁺ U and W U [J, W, R], leading first. Directions beyond the rank are zero
    random_out, random_read   the same with random U of the same rank
    """

    out: Float64[np.ndarray, "J W R"]
    read: Float64[np.ndarray, "J W R"]
    random_out: Float64[np.ndarray, "J W R"]
    random_read: Float64[np.ndarray, "J W R"]

    @property
    def arrays(self) -> tuple[Array, ...]:
        return self.out, self.read, self.random_out, self.random_read


@dataclass(frozen=True, eq=False)
class PositionFit:
    """Positional directions of one model at depths 0 … L (J = L + 1), fitted on separate prompts.

    directions    V [J, W, K], orthonormal columns, leading first
    mean          c [J, W]
    coefficient   a [J, P, K] at positions m … N − 1
    origin        m;  length: N;  prompts: their number;  seed: of these prompts;  source: of these prompts
    leace         directions of LEACE, if they were requested
    """

    directions: Float64[np.ndarray, "J W K"]
    mean: Float64[np.ndarray, "J W"]
    coefficient: Float64[np.ndarray, "J P K"]
    origin: int
    length: int
    prompts: int
    seed: int
    source: str
    leace: Leace | None = None

    @property
    def sha256(self) -> str:
        """The hash of directions, means and coefficients."""
        leace = () if self.leace is None else self.leace.arrays
        digest = hashlib.sha256()
        for array in (self.directions, self.mean, self.coefficient, *leace):
            digest.update(np.ascontiguousarray(array, dtype="<f8").tobytes())
        return digest.hexdigest()

    @classmethod
    def of(
        cls, subject: Subject, base: Prompts, origin: int, *, prompts: int | None = None, leace: int | None = 0
    ) -> PositionFit:
        """Fit on prompts that differ from `base` in their seed only; given prompts are replaced by random tokens.

        origin    number of leading tokens that are left out
        prompts   number of prompts, even; None: about FIT_TOKENS tokens
        leace     number of LEACE directions; 0: no LEACE, None: all
        """
        own = fit_prompts(subject, base)
        prompts = prompts or fit_size(own.length)
        with stage("position fit"):
            sums = _sums(subject.model, own, origin, prompts, squares=leace != 0)
            one, other = (list(half.values()) for half in sums.halves)
            fit = cls(*_directions(one, other, prompts // 2), origin, own.length, prompts, own.seed, own.source)
            if leace == 0:
                return fit
            parts = [
                _leace(square / (prompts * fit.positions), (first + second) / prompts, leace, depth)
                for depth, (square, first, second) in enumerate(zip(sums.squares.values(), one, other, strict=True))
            ]
            return replace(fit, leace=Leace(*(_stacked(part) for part in zip(*parts, strict=True))))

    @property
    def positions(self) -> int:
        """The number of positions P = N − m."""
        return self.length - self.origin


def cached_fit(
    subject: Subject, base: Prompts, origin: int, cache: dict[Any, Any], *, leace: int | None = 0
) -> PositionFit:
    """Return the fit for prompts like `base` from the cache of the subject's model, or fit and keep it."""
    key = (base.source, base.policy, base.length, base.seed, origin, leace)
    if key not in cache:
        cache[key] = PositionFit.of(subject, base, origin, leace=leace)
    fit: PositionFit = cache[key]
    return fit


def fit_prompts(subject: Subject, base: Prompts) -> Prompts:
    """Return the prompts for a fit: like `base`, with another seed."""
    source = "random" if isinstance(base.body, GivenBody) else base.source
    seed = (base.seed + FIT_SEED) % SEED_LIMIT
    return prepare(subject, source, bos=base.policy, length=base.length, seed=seed)


def fit_size(length: int) -> int:
    """Return the number of prompts of a fit, which is even."""
    return 2 * int(np.clip(FIT_TOKENS // length, *FIT_PROMPTS) // 2)


def read(probe: Probe, prompts: Prompts, indices: range) -> None:
    """Run the model on some of the prompts, in batches."""
    at_once = max(1, TOKENS_AT_ONCE // prompts.length)
    for first in range(0, len(indices), at_once):
        ids = prompts.batch(indices[first : first + at_once])
        probe.forward(torch.from_numpy(ids).to(input_device(probe.model)))


def head_means(model: PreTrainedModel, prompts: Prompts, origin: int) -> tuple[Float64[Tensor, "_H _Ev"], ...]:
    """Return the mean output of every head by attention call, over prompts and positions >= m."""
    count, sums = fit_size(prompts.length), dict[int, Tensor]()
    observer = Collector(lambda call, out: _add(sums, call.index, out[:, :, origin:].double().sum((0, 2)).cpu()))
    with stage("head means"), attach(model, [observer]) as probe:
        read(probe, prompts, range(count))
    return tuple(sums[call] / (count * (prompts.length - origin)) for call in sorted(sums))


@dataclass
class StreamSums:
    """Observer that sums the residual stream over prompts, at positions >= m.

    halves    by half of the prompts and depth: Σ_b h_b(p) [P, W];  half: the one to which prompts are added
    squares   by depth: Σ_{b,p} h_b(p) h_b(p)ᵀ [W, W], if `squared`
    """

    origin: int
    squared: bool = False
    half: int = 0
    halves: tuple[dict[int, Tensor], dict[int, Tensor]] = field(default_factory=lambda: ({}, {}))
    squares: dict[int, Tensor] = field(default_factory=dict)

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        pass

    def stream(self, depth: int, x: Float[Tensor, "B T W"]) -> None:
        body = x[:, self.origin :].cpu().double()
        _add(self.halves[self.half], depth, body.sum(0))
        if self.squared:
            flat = body.flatten(0, 1)
            _add(self.squares, depth, flat.mT @ flat)


def _add(sums: dict[int, Tensor], depth: int, x: Tensor) -> None:
    sums[depth] = sums[depth].add_(x) if depth in sums else x


def _sums(model: PreTrainedModel, prompts: Prompts, origin: int, count: int, *, squares: bool) -> StreamSums:
    """Return sums over prompts 0 … count − 1, the first half of them in one half."""
    observer = StreamSums(origin, squares)
    with attach(model, [observer]) as probe:
        for observer.half in range(2):
            read(probe, prompts, range(observer.half * count // 2, (observer.half + 1) * count // 2))
    require_one_stream(model, observer.halves[0])
    return observer


def require_one_stream(model: PreTrainedModel, seen: dict[int, Tensor]) -> None:
    """Raise an UnsupportedError unless the stream was seen at depths 0, 1, …, L, in this order."""
    depths = range(len(decoder_layers(model)) + 1)
    if len(depths) == 1 or list(seen) != list(depths):
        raise several_streams(model)


def several_streams(model: PreTrainedModel) -> UnsupportedError:
    """Return the error for a model without one residual stream."""
    return UnsupportedError(
        "positional directions are not defined: this model does not have one residual stream",
        where=type(model).__name__, expected="one tensor [prompts, positions, width] at every depth",
        remedy="use `posleak measure` or `posleak trace` without --edit position=…",
    )  # fmt: skip


def _directions(
    one: list[Float64[Tensor, "P W"]], other: list[Float64[Tensor, "P W"]], prompts: int
) -> tuple[Float64[np.ndarray, "J W K"], Float64[np.ndarray, "J W"], Float64[np.ndarray, "J P K"]]:
    """Return directions, mean and coefficients at every depth from the sums of two halves of `prompts` prompts each."""
    directions, means, coefficients = [], [], []
    for first, second in zip(one, other, strict=True):
        mean = (first + second).div_(2 * prompts)
        v = leading_directions(first / prompts, second / prompts)
        c = mean.mean(0)
        a = (mean - c) @ v
        late = torch.arange(len(a), dtype=a.dtype) - (len(a) - 1) / 2
        sign = torch.where(late @ a < 0, -1.0, 1.0).to(a)
        directions.append(v * sign)
        means.append(c)
        coefficients.append(a * sign)
    return _stacked(directions), _stacked(means), _stacked(coefficients)


def leading_directions(first: Float64[Tensor, "P W"], second: Float64[Tensor, "P W"]) -> Float64[Tensor, "W K"]:
    """Return the leading eigenvectors of the symmetrised cross-covariance C of the means of two halves.

    They are computed in the span of the rows of both, which may be smaller than W.
    """
    one, other = first - first.mean(0), second - second.mean(0)
    basis, _ = torch.linalg.qr(torch.cat([one, other]).mT)
    x, y = one @ basis, other @ basis
    product = x.mT @ y
    _, vectors = torch.linalg.eigh((product + product.mT) / (2 * len(x)))
    leading: Tensor = basis @ vectors.flip(-1)[:, :MAX_DIRECTIONS]
    return leading


def random_directions(width: int, count: int, seed: int, depth: int) -> Float64[Tensor, "W K"]:
    """Return random orthonormal columns, which depend on nothing but the arguments."""
    words = np.random.SeedSequence([seed, depth]).generate_state(1)  # torch reads 32 bits of a seed
    generator = torch.Generator().manual_seed(int(words[0]))
    columns: Tensor = torch.linalg.qr(torch.randn(width, count, generator=generator, dtype=torch.float64))[0]
    return columns


def _leace(
    second: Float64[Tensor, "W W"], mean: Float64[Tensor, "P W"], count: int | None, depth: int
) -> tuple[Float64[Tensor, "W R"], ...]:
    """Return the arrays of `Leace` at one depth.

    second   mean of h hᵀ over prompts and positions;  mean: of h over prompts, at each position
    count    number R of directions; None: all
    """
    c = mean.mean(0)
    values, vectors = torch.linalg.eigh(second - c[:, None] * c)
    epsilon = torch.finfo(values.dtype).eps
    exists = values > values[-1] * len(values) * epsilon
    root = torch.where(exists, values, 1.0).sqrt()
    whiten, unwhiten = ((vectors * torch.where(exists, scale, 0.0)) @ vectors.mT for scale in (1 / root, root))
    u, s, _ = torch.linalg.svd(whiten @ (mean - c).mT, full_matrices=False)  # Σxz, but for a factor
    found = s > s[0] * max(mean.shape) * epsilon
    u, span = (u * found)[:, :count], vectors[:, exists]
    random = span @ random_directions(span.shape[1], min(u.shape[1], span.shape[1]), 0, depth)
    random = torch.nn.functional.pad(random, (0, u.shape[1] - random.shape[1])) * found[: u.shape[1]]
    return unwhiten @ u, whiten @ u, unwhiten @ random, whiten @ random


def _stacked(parts: list[Tensor] | tuple[Tensor, ...]) -> Float64[np.ndarray, "J ..."]:
    return torch.stack(list(parts)).numpy()
