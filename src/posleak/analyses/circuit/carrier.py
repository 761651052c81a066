"""What carries position in the residual stream: how much of the variance, and which directions.

With x_b(p) = h_b(p) − mean_p h_b the stream of prompt b at one depth, at positions p ≥ m,

    positional   mean over b ≠ c of Σ_p x_b(p) · x_c(p)        what prompts have in common: Σ_p ‖E x(p)‖², unbiased
    share        positional / mean over b of Σ_p ‖x_b(p)‖²     the positional share of the variance
    spectrum     for each direction v_k of the fit, the same product of the coefficients x_b(p) · v_k, / positional
    leading      spectrum of the leading direction

The directions are fitted on other prompts (edits/positional.py), so that no prompt is both fitted and evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from posleak.analyses.origin.portrait import is_massive
from posleak.arrays import Array
from posleak.defaults import TOKENS_AT_ONCE
from posleak.edits.direction import ERASE, PositionEdit
from posleak.edits.positional import PositionFit, cached_fit
from posleak.leakage import Estimate, Jackknife
from posleak.leakage.power import of_gram
from posleak.models import Subject, input_device
from posleak.probe import Plan, attach
from posleak.runs.conditions import Conditions
from posleak.runs.memory import MemoryPlan, ModelSizes, describe_prompts, loss_bytes, require_room
from posleak.runs.spec import MeasureSpec, batches, parse_bytes
from posleak.typed import plain

if TYPE_CHECKING:
    from posleak.probe import Call

CARRIED = 0.9
"""Share of the positional variance that `dimensions` directions carry."""

CURVE_POSITIONS = 48
"""Most positions of the curve."""

STATES_BYTES = 2**29
"""Bytes of states that are held at the same time; more depths take further passes."""

DEPTH_COPIES = 4
"""Copies in float64 of the states of all prompts at one depth, while their products are computed."""


@dataclass(frozen=True)
class FitFacts:
    """Facts about a fit: the hash of its directions, and its prompts."""

    sha256: str
    prompts: int
    length: int
    seed: int
    source: str

    @classmethod
    def of(cls, fit: PositionFit) -> FitFacts:
        return cls(fit.sha256, fit.prompts, fit.length, fit.seed, fit.source)


@dataclass(frozen=True)
class Carrier:
    """What carries position, at depths 0 … L (J = L + 1) of the residual stream.

    share        [J]  positional share of the variance
    leading      [J]  share of the positional variance along the leading direction; NaN where the positional variance is
                 not significantly above 0
    spectrum     [J, K]  the same for each direction of the fit
    dimensions   [J]  fewest directions that carry CARRIED of it; None: more than K, or not defined
    alignment    [J, J]  |cos| between the leading directions of two depths
    with_origin  [J]  cosine between the leading direction and the mean state of position 0
    in_massive   [J]  share of the squared norm of the leading direction in the massive channels
    massive      [J]  channels in which the mean state of position 0 is massive by the rule of Sun et al. 2024: |x| >
                 100 and at least 1000 × the median |x| of the states at positions >= m
    curve        [J, S]  mean coefficient along the leading direction, from the fit's mean state
    positions    [S]  the positions of the curve
    fit          the fit of the directions
    """

    share: Estimate
    leading: Estimate
    spectrum: Estimate
    dimensions: tuple[int | None, ...]
    alignment: Array
    with_origin: Array
    in_massive: Array
    massive: tuple[tuple[int, ...], ...]
    curve: Estimate
    positions: tuple[int, ...]
    fit: FitFacts

    @classmethod
    def measure(cls, conditions: Conditions, fit: PositionFit) -> Carrier:
        """Evaluate the directions of a fit on the prompts of the baseline."""
        positions, n = curve_positions(conditions.spec.plan), conditions.spec.prompts
        depths = [_Depth.of(x, fit, depth, positions) for depth, x in _states(conditions, len(fit.mean), range(n))]
        jackknife = Jackknife(n)
        positional = jackknife.inner(of_gram(np.stack([depth.gram for depth in depths])))
        along = jackknife.inner(of_gram(np.stack([depth.along for depth in depths])))
        variance = jackknife.mean(np.stack([np.diagonal(depth.gram) for depth in depths], axis=1))
        spectrum = along.over(positional[:, None])
        leading, origins = fit.directions[:, :, 0], np.stack([depth.origin for depth in depths])
        return cls(
            share=positional.over(variance).estimate, leading=spectrum[:, 0].estimate, spectrum=spectrum.estimate,
            dimensions=tuple(_dimensions(row) for row in np.asarray(spectrum.value)),
            alignment=np.abs(leading @ leading.T), with_origin=_cosines(leading, origins),
            in_massive=np.array(
                [(v[list(depth.massive)] ** 2).sum() for v, depth in zip(leading, depths, strict=True)]
            ),
            massive=tuple(depth.massive for depth in depths),
            curve=jackknife.mean(np.stack([depth.curve for depth in depths], axis=1)).estimate,
            positions=positions, fit=FitFacts.of(fit),
        )  # fmt: skip

    @property
    def last(self) -> int:
        """The depth of the output of the last layer."""
        return len(self.dimensions) - 1

    @property
    def middle(self) -> int:
        """The depth in the middle of the model."""
        return self.last // 2

    def as_list(self) -> list[dict[str, Any]]:
        """Return one JSON object per depth."""
        rows: list[dict[str, Any]] = plain(
            [
                {
                    "depth": depth, "variance_share": self.share[depth], "leading": self.leading[depth],
                    "dimensions": self.dimensions[depth], "eigenvalues": self.spectrum[depth],
                    "with_origin": self.with_origin[depth], "in_massive": self.in_massive[depth],
                    "massive": self.massive[depth], "alignment": self.alignment[depth], "curve": self.curve[depth],
                }
                for depth in range(len(self.dimensions))
            ]
        )  # fmt: skip
        return rows


def significant_depths(conditions: Conditions, fit: PositionFit) -> list[int]:
    """Return the depths after the embedding at which the positional variance is significantly above 0.

    They are chosen on the prompts of the ranking, so that no prompt both chooses depths and evaluates them.
    """
    n = conditions.spec.prompts
    grams = [_gram(_centred(x, fit.origin)) for _, x in _states(conditions, len(fit.mean), range(n, 2 * n))]
    low = Jackknife(n).inner(of_gram(np.stack(grams))).estimate.low
    return [int(depth) for depth in np.flatnonzero(np.asarray(low) > 0) if depth > 0]


def fit_of(conditions: Conditions) -> PositionFit:
    """Return the fit that `position=…` edits of these conditions use, after a check of the memory."""
    run = conditions.baseline
    require_room(
        run.subject, carrier_plan(run.subject, run.spec), parse_bytes(conditions.max_memory),
        what="the analysis of what carries position", of=describe_prompts(run.spec.prompts, run.spec.length),
        remedy="use fewer --prompts or a shorter --length",
    )  # fmt: skip
    return cached_fit(run.subject, run.base, conditions.spec.origin, run.fit_cache)


def carrier_plan(subject: Subject, spec: MeasureSpec) -> MemoryPlan:
    """Return the memory plan of a fit, of `Carrier.measure` and of the loss under an erasure."""
    sizes, item = ModelSizes.of(subject), subject.dtype.itemsize
    depth = spec.prompts * spec.length * sizes.width
    return MemoryPlan(
        sizes.forward(max(TOKENS_AT_ONCE, spec.batch * spec.length), item),
        max(STATES_BYTES, 4 * depth) + DEPTH_COPIES * 8 * depth + loss_bytes(subject, spec.batch),
        PositionEdit(ERASE).fit_bytes(sizes.layers + 1, sizes.width, spec.length),
    )


def curve_positions(plan: Plan) -> tuple[int, ...]:
    """Return the first position after the origin and the sampled rows, thinned to at most CURVE_POSITIONS."""
    rows = sorted({plan.origin, *plan.rows})
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(CURVE_POSITIONS, len(rows))).astype(int))
    return tuple(rows[i] for i in chosen)


@dataclass
class _States:
    """Observer that keeps the residual stream at some depths, in float32 on the CPU."""

    depths: Sequence[int]
    kept: dict[int, list[Tensor]] = field(default_factory=dict)

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        pass

    def stream(self, depth: int, x: Float[Tensor, "B T W"]) -> None:
        if depth in self.depths:
            self.kept.setdefault(depth, []).append(x.float().cpu())


def _states(conditions: Conditions, depths: int, prompts: range) -> Iterator[tuple[int, Float[Tensor, "B T W"]]]:
    """Yield the states of some prompts, depth by depth; each pass over the prompts keeps STATES_BYTES of them."""
    run, width = conditions.baseline, conditions.baseline.subject.identity.width
    at_once = max(1, STATES_BYTES // (4 * len(prompts) * conditions.spec.length * width))
    for first in range(0, depths, at_once):
        observer = _States(range(first, min(first + at_once, depths)))
        with attach(run.subject.model, [observer]) as probe:
            for batch in batches(len(prompts), run.spec.batch):
                ids = run.base.batch(prompts[batch.start : batch.stop])
                probe.forward(torch.from_numpy(ids).to(input_device(run.subject.model)))
        for depth in observer.depths:
            yield depth, torch.cat(observer.kept.pop(depth))


@dataclass(frozen=True)
class _Depth:
    """Products and coefficients of B prompts at one depth.

    gram     [B, B]  Σ_p x_b(p) · x_c(p);  along: [K, B, B] of the coefficients along each direction
    curve    [B, S]  (h_b(p) − c) · v at some positions
    origin   [W]  mean state of position 0;  massive: its massive channels
    """

    gram: Float64[np.ndarray, "B B"]
    along: Float64[np.ndarray, "K B B"]
    curve: Float64[np.ndarray, "B S"]
    origin: Float64[np.ndarray, "W"]
    massive: tuple[int, ...]

    @classmethod
    def of(cls, states: Float[Tensor, "B T W"], fit: PositionFit, depth: int, positions: Sequence[int]) -> _Depth:
        v, c = torch.from_numpy(fit.directions[depth]), torch.from_numpy(fit.mean[depth])
        origin = states[:, 0].double().mean(0)
        x = _centred(states, fit.origin)
        a = x @ v
        massive = is_massive(origin, float(states[:, fit.origin :].abs().flatten().median()))
        return cls(
            _gram(x), torch.einsum("bpk,cpk->kbc", a, a).numpy(),
            ((states[:, list(positions)].double() - c) @ v[:, 0]).numpy(), origin.numpy(),
            tuple(massive.nonzero()[:, 0].tolist()),
        )  # fmt: skip


def _centred(states: Float[Tensor, "B T W"], origin: int) -> Float64[Tensor, "B P W"]:
    """Return x: the states at positions >= origin, minus their mean over positions."""
    h = states[:, origin:].double()
    return h - h.mean(1, keepdim=True)


def _gram(x: Float64[Tensor, "B P W"]) -> Float64[np.ndarray, "B B"]:
    flat = x.flatten(1)
    return np.asarray((flat @ flat.mT).numpy())


def _dimensions(spectrum: Float64[np.ndarray, "K"]) -> int | None:
    """Return the smallest number of directions that carry CARRIED of the positional variance."""
    enough = np.flatnonzero(np.cumsum(spectrum) >= CARRIED)
    return int(enough[0]) + 1 if len(enough) else None


def _cosines(x: Float64[np.ndarray, "J W"], y: Float64[np.ndarray, "J W"]) -> Float64[np.ndarray, "J"]:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1))
