"""The meters of posleak: of logits before the softmax, of attention after it, and of the residual stream.

Meters of logits do not see the causal mask, which acts in the softmax's denominator. One of them is ΔR² (Ruscio, "Once
upon a token", 2025), which compares two least-squares fits over visible pairs:

    ΔR² = R²[ s ~ 1 + (i − j) + i + j ] − R²[ s ~ 1 + (i − j) ]

i, j and i − j are linearly dependent, so the larger design has rank 3: constant, offset and query position. By the
Frisch–Waugh–Lovell theorem the difference is the squared partial correlation with i, given the offset. In this form
there is no cancellation, and it is never negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from posleak.axes import BAND, DEPTH, HEAD, LAYER, OFFSET, SCALE, THRESHOLD
from posleak.probe import Plan

from . import graphs, spectra
from .meter import Arrays, Glimpse, Meter, start_attention
from .ridge import GROUPS, cross_predict, rescaled, ridge_problem

FIEDLER_TOKENS = 128
"""Number of first tokens in the graph for the Fiedler value, whose cost is cubic."""

LARGE, TIMES = 100.0, 1000.0
"""Sun et al. (2024): an activation is massive if |x| > LARGE and |x| > TIMES · median |x|."""

MEDIAN_POSITIONS = 64
"""Number of evenly spaced positions whose activations the median is computed from."""

VALLEY_TOKENS = 128
"""Number of first tokens in the spectrum. By causality their states are those of a prompt of that length."""


class PositionMeter(Meter):
    """ΔR² of Ruscio (2025): how much variance of the logits positions explain linearly beyond the offset."""

    name = "positions"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"r2_offset": (LAYER, HEAD), "delta_r2": (LAYER, HEAD)}

    def look(self, seen: Glimpse) -> Arrays:
        moments = seen.call.visibility.cached("design", lambda: PositionMoments(seen.visible, seen.rows, seen.weights))
        r2_offset, delta_r2 = explained(seen.logits, moments)
        return {"r2_offset": r2_offset.cpu().numpy(), "delta_r2": delta_r2.cpu().numpy()}


class ToeplitzMeter(Meter):
    """Mean logit of each diagonal at the plan's offsets. Kim's map (2025) is the deviation of the logits from it;
    table.py computes that from the logits which the leakage stores."""

    name = "toeplitz"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"diagonal": (LAYER, HEAD, OFFSET)}

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @classmethod
    def of(cls, plan: Plan) -> Meter:
        return cls(plan)

    def look(self, seen: Glimpse) -> Arrays:
        key = seen.rows[:, None] - torch.tensor(self.plan.offsets, device=seen.rows.device)
        exists = (key >= 0) & seen.visible.gather(1, key.clamp(min=0))
        index = key.clamp(min=0).expand(*seen.logits.shape[:2], -1, -1)
        count = exists * seen.weights[:, None]
        sums = (seen.logits.gather(-1, index) * count).sum(2, dtype=torch.float64)
        return {"diagonal": (sums / count.sum(0)).cpu().numpy()}


class PositionMoments:
    """Central moments of offset and query position over visible pairs. weights: queries that each row represents."""

    def __init__(self, visible: Bool[Tensor, "P T"], rows: Int[Tensor, "P"], weights: Int[Tensor, "P"]) -> None:
        self.visible, self.query, self.weights = visible, rows.double(), weights.double()
        pairs = visible.double() * self.weights[:, None]
        self.count = float(pairs.sum())
        offset = self.query[:, None] - torch.arange(visible.shape[1], device=visible.device).double()
        self.mean_offset = float((pairs * offset).sum() / self.count)
        self.mean_query = float((pairs.sum(1) * self.query).sum() / self.count)
        d, q = offset - self.mean_offset, self.query[:, None] - self.mean_query
        self.offset_offset, self.offset_query, self.query_query = (
            float((pairs * x * y).sum()) for x, y in ((d, d), (d, q), (q, q))
        )


def explained(
    logits: Float[Tensor, "B H P T"], moments: PositionMoments
) -> tuple[Float64[Tensor, "B H"], Float64[Tensor, "B H"]]:
    """Return R² of the offset alone and ΔR² of the position given the offset; NaN where logits do not vary."""
    # Sums are taken about a value near the mean, for precision; which value does not matter.
    last = moments.visible[-1].nonzero().flatten()
    near = logits[:, :, -1, last].mean(-1)
    s = (logits - near[..., None, None]).mul_(moments.visible.to(logits.dtype))
    key = torch.arange(s.shape[-1], device=s.device, dtype=s.dtype)
    sums = (s @ torch.stack([torch.ones_like(key), key], dim=-1)).double() * moments.weights[:, None]  # [B, H, P, 2]
    total, with_query = sums[..., 0].sum(-1), (sums[..., 0] * moments.query).sum(-1)
    with_offset = with_query - sums[..., 1].sum(-1)
    with_query, with_offset = with_query - moments.mean_query * total, with_offset - moments.mean_offset * total
    squares = torch.linalg.vector_norm(s, dim=-1).double().square() @ moments.weights
    power = squares - total**2 / moments.count
    power = torch.where(power > 0, power, torch.nan)
    # What the offset does not explain: of the query position, and of its covariance with the logits.
    residual = moments.query_query - moments.offset_query**2 / moments.offset_offset
    partial = with_query - moments.offset_query / moments.offset_offset * with_offset
    return with_offset**2 / (moments.offset_offset * power), partial**2 / (residual * power)


class SinkMeter(Meter):
    """α_0 of Gu et al. (2025): mean attention of the first 64 queries to position 0."""

    name = "sinks"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"sink_start": (LAYER, HEAD)}

    def look(self, seen: Glimpse) -> Arrays:
        return {"sink_start": start_attention(seen.call)[..., 0].double().mean(-1).cpu().numpy()}


class RolloutMeter(Meter):
    """Attention rollout to position 0: (A^l … A^1)_i0 of Wu et al. (2025), mean over i.

    A is averaged over heads, and over the calls of a layer that makes several. Its rows are normalised to 1, also where
    a head has a learned sink logit. The residual connection is ignored.
    """

    name = "rollout"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"rollout": (LAYER,)}

    def __init__(self) -> None:
        self.layer: int | None = None
        self.before, self.after = torch.empty(0), torch.empty(0)
        self.calls = list[Tensor]()

    def look(self, seen: Glimpse) -> Arrays:
        attention = seen.mean_attention
        if seen.call.index == 0:
            self.layer, self.after = None, torch.zeros_like(attention[:, 0])
            self.after[:, 0] = 1
        if seen.call.layer != self.layer:
            self.layer, self.before, self.calls = seen.call.layer, self.after, []
        read = (attention @ self.before.to(attention)[..., None])[..., 0] / attention.sum(-1)
        self.calls.append(seen.sampling.spread(read))
        self.after = torch.stack([call.to(read) for call in self.calls]).mean(0)
        return {"rollout": self.after[:, 1:].double().mean(-1).cpu().numpy()}


class FrameMeter(Meter):
    """Reference frames of Ruscio et al. (2025): the graph of a layer's attention, averaged over heads.

    centralized + distributed + bidirectional + no_frame = 1; no_frame is 1 without an anchor, and 0 otherwise.
    """

    name = "frames"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "star": (LAYER, THRESHOLD), "centralisation": (LAYER, THRESHOLD), "fiedler": (LAYER,),
        "concentration": (LAYER,), "reference_tokens": (LAYER,), "kl_reduction": (LAYER,),
        "centralized": (LAYER,), "distributed": (LAYER,), "bidirectional": (LAYER,), "no_frame": (LAYER,),
        "anchors": (LAYER,),
    }  # fmt: skip
    coords: ClassVar[Mapping[str, Sequence[Any]]] = {THRESHOLD: graphs.THRESHOLDS}

    def look(self, seen: Glimpse) -> Arrays:
        visible = seen.call.visibility.cached("seen by rows", lambda: seen.visible.cpu().numpy())
        graph = graphs.AttentionGraph(seen.mean_attention.double().cpu().numpy(), visible, seen.sampling.rows)
        first = start_attention(seen.call, FIEDLER_TOKENS).mean(1).double().cpu().numpy()
        return {
            "star": graph.star(), "centralisation": graph.centralisation(), "fiedler": graphs.fiedler(first),
            "concentration": graph.concentration(), "reference_tokens": graph.reference_tokens(),
            "kl_reduction": graph.kl_reduction(), **graph.frame(),
        }  # fmt: skip


class WaveletMeter(Meter):
    """Fourier and wavelet spectra of attention by offset, after Ruscio et al. (2024)."""

    name = "wavelets"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "entropy_position": (LAYER, HEAD), "entropy_spectrum": (LAYER, HEAD), "selectivity": (LAYER, HEAD),
        "bands": (LAYER, HEAD, BAND), "wavelet_energy": (LAYER, HEAD, SCALE), "wavelet_entropy": (LAYER, HEAD, SCALE),
        "scale_half": (LAYER, HEAD), "scale_quarter": (LAYER, HEAD),
    }  # fmt: skip
    coords: ClassVar[Mapping[str, Sequence[Any]]] = {BAND: ("low", "middle", "high")}

    def look(self, seen: Glimpse) -> Arrays:
        profile = seen.by_offset
        if profile is None:
            return {}
        power, (energy, entropy) = spectra.power_spectrum(profile), spectra.wavelets(profile)
        return {
            "entropy_position": spectra.entropy(profile), "entropy_spectrum": spectra.entropy(power),
            "selectivity": spectra.selectivity(power), "bands": spectra.band_shares(power),
            "wavelet_energy": energy, "wavelet_entropy": entropy,
            "scale_half": spectra.scale_sensitivity(profile, 2), "scale_quarter": spectra.scale_sensitivity(profile, 4),
        }  # fmt: skip


class MassiveMeter(Meter):
    """Massive activations: the largest |x|, its ratio to the median, the number of massive activations, and the number
    of those at position 0."""

    name = "massive"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("largest", "largest_times", "massive", "massive_first"), (DEPTH,)
    )

    def depth(self, depth: int, x: Float[Tensor, "B T W"]) -> Arrays:
        size = x.float().abs()
        sampled = size[:, :: -(-x.shape[1] // MEDIAN_POSITIONS)].flatten(1)
        median = sampled.median(1).values.clamp(min=torch.finfo(size.dtype).tiny)
        largest = size.amax((1, 2))
        massive = (size > (TIMES * median).clamp(min=LARGE)[:, None, None]).sum(-1)  # [B, T]
        arrays = {
            "largest": largest, "largest_times": largest / median,
            "massive": massive.sum(1), "massive_first": massive[:, 0],
        }  # fmt: skip
        return {name: value.double().cpu().numpy() for name, value in arrays.items()}


class ValleyMeter(Meter):
    """The compression valley of Queipo-de-Llano et al. (2025): entropy of the singular spectrum of the states, the norm
    at position 0, and the median norm at other positions."""

    name = "valley"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = dict.fromkeys(
        ("spectrum_entropy", "norm_0", "norm_body"), (DEPTH,)
    )

    def depth(self, depth: int, x: Float[Tensor, "B T W"]) -> Arrays:
        norms = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)).double()
        entropy, body = spectrum_entropy(x[:, :VALLEY_TOKENS]), norms[:, 1:].median(1).values
        arrays = {"spectrum_entropy": entropy, "norm_0": norms[:, 0], "norm_body": body}
        return {name: value.cpu().numpy() for name, value in arrays.items()}


def spectrum_entropy(x: Float[Tensor, "B T W"]) -> Float[Tensor, "B"]:
    """Return −Σ p log p in nats, p_k = σ_k² / Σ σ², with σ the singular values of the states, not centred."""
    x = x.double()
    gram = x @ x.mT if x.shape[1] <= x.shape[2] else x.mT @ x
    p = graphs.eigenvalues(gram).clamp(min=0)
    p = p / p.sum(-1, keepdim=True)
    entropy: Tensor = torch.special.entr(p).sum(-1)
    return entropy


class ProbeMeter(Meter):
    """The position probe of Haviv et al. (2022), linear: ridge regression of the position on states, cross-validated
    over prompts. Wide states are reduced by a fixed random projection; `posleak origin` probes whole states."""

    name = "probe"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"probe_error": (DEPTH,), "probe_states": (DEPTH, "place", "x")}

    PLACES = 32
    """Number of evenly spaced positions, from 1 on, whose states are used."""

    FEATURES = 128
    """Number of dimensions of the projection."""

    def __init__(self, length: int) -> None:
        self.places = np.unique(np.rint(np.linspace(1, length - 1, self.PLACES)).astype(np.int64))
        self.projection: Tensor | None = None

    @classmethod
    def of(cls, plan: Plan) -> Meter:
        return cls(plan.length)

    def depth(self, depth: int, x: Float[Tensor, "B T W"]) -> Arrays:
        states = rescaled(x[:, self.places].float())
        if x.shape[-1] > self.FEATURES:
            if self.projection is None or self.projection.shape[0] != x.shape[-1]:
                self.projection = projection(x.shape[-1], self.FEATURES).to(states)
            states = states @ self.projection
        return {"probe_states": states.cpu().numpy()}

    def finished(self, data: Arrays) -> Arrays:
        """Replace states by held-out errors in tokens, by prompt and depth; NaN for fewer than three prompts."""
        if "probe_states" not in data:
            return data
        states = data.pop("probe_states")  # [B, J, places, features]
        B, J = states.shape[:2]
        error = np.full((B, J), np.nan)
        if B >= 3:
            fold = np.arange(B) % min(GROUPS, B)
            target = torch.from_numpy(self.places).double()[:, None]
            for depth in range(J):
                error[:, depth] = _held_out(torch.from_numpy(states[:, depth]).double(), target, fold)
        return data | {"probe_error": error}


def _held_out(x: Tensor, target: Tensor, fold: np.ndarray) -> np.ndarray:
    """Return the mean |predicted − true| of each prompt [B]; each group is predicted from the others."""
    x = x - x.flatten(0, 1).mean(0)
    groups = [np.flatnonzero(fold == g) for g in range(int(fold.max()) + 1)]
    rows, y = [x[group].flatten(0, 1) for group in groups], [target.repeat(len(group), 1) for group in groups]
    error = np.empty(len(x))
    for group, guess, true in zip(groups, cross_predict(ridge_problem(rows, y), rows, y), y, strict=True):
        error[group] = (guess - true).abs().view(len(group), -1).mean(1).numpy()
    return error


def projection(width: int, features: int) -> Float[Tensor, "{width} {features}"]:
    """Return a Gaussian random projection that preserves expected squared norms; the same on every machine."""
    normal = np.random.Generator(np.random.PCG64(np.random.SeedSequence([width, features]))).standard_normal
    return torch.from_numpy(normal((width, features)) / features**0.5)
