"""The claims of arXiv 2410.18067: heads of RoPE models resemble the filters of a wavelet transform.

The profile of a head is its mean attention by offset; docs/metrics.md defines the measures computed from it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from jaxtyping import Float64

from posleak.analyses.claims import catalogue
from posleak.analyses.claims.catalogue import Finding, Side
from posleak.analyses.claims.lab import Lab
from posleak.arrays import Array
from posleak.errors import UnsupportedError
from posleak.leakage.contrast import correlated, mean_difference, octave_cosines
from posleak.papers import WAVELETS

claim = partial(catalogue.claim, paper=WAVELETS, metrics=True)
untestable = partial(catalogue.untestable, paper=WAVELETS)

NO_ROPE = "the claim is about models with RoPE, and this one has no rotary position encoding"


untestable(
    1, "wavelets.compensate", "Wavelets compensate for RoPE's limits",
    "Wavelet-like properties compensate for theoretical limitations of the position encoding.",
    "what a property compensates for is seen where it is missing: a test needs models that were trained without it",
)  # fmt: skip


def finite_heads(lab: Lab, *names: str) -> list[Float64[np.ndarray, "B heads *rest"]]:
    """Return metrics of those heads of all layers that have finite values everywhere, with heads on one axis.

    Raise UnsupportedError if there are fewer than three such heads.
    """
    metrics = [lab.metric(name) for name in names]
    flat = [x.reshape(x.shape[0], -1, *x.shape[3:]) for x in metrics]
    finite = np.all([np.isfinite(np.moveaxis(x, 1, 0)).reshape(x.shape[1], -1).all(1) for x in flat], axis=0)
    if finite.sum() < 3:
        raise UnsupportedError("fewer than three heads have a profile that varies with the offset")
    return [x[:, finite] for x in flat]


def octaves(energy: Float64[np.ndarray, "*cells S"]) -> Float64[np.ndarray, "*cells"]:
    """Return the preferred scale of a head in octaves: the mean scale index, weighted by the energy."""
    scale: Array = energy @ np.arange(energy.shape[-1], dtype=float)
    return scale


@claim(
    2, "wavelets.resolutions", "Heads work at many resolutions",
    "Attention heads implement multi-resolution processing, as wavelet transforms do.",
    "wavelet energy (db2) of each head's attention by offset; the preferred scale is the mean scale, in octaves; mean "
    "difference between two heads. Claimed to be more than 1 octave, the step between scales of the transform: heads "
    "that differ by less share one resolution",
)  # fmt: skip
def resolutions(lab: Lab) -> Finding:
    if not lab.rotary:
        return Finding.not_applicable(NO_ROPE)
    (energy,) = finite_heads(lab, "wavelet_energy")
    scale = octaves(energy)
    details = {
        "heads": energy.shape[1],
        "scales": energy.shape[2],
        "preferred scale": lab.mean(scale.mean(1)),
        "width of one head, in octaves": lab.jackknife.of_means(_width, energy).estimate,
    }
    apart = lab.jackknife.of_means(mean_difference, scale).estimate
    return Finding.of(apart, "octaves", no_effect=1.0, details=details)


def _width(energy: Float64[np.ndarray, "heads S"]) -> float:
    """Return the standard deviation of the scale within a head, mean over heads."""
    scale = np.arange(energy.shape[-1], dtype=float)
    return float(np.sqrt(np.maximum(energy @ scale**2 - octaves(energy) ** 2, 0)).mean())


ZOOM = (
    "wavelet energy of each head by scale, compared with energies one octave higher, as if seen from twice the "
    "distance: 1 − cosine with the same head, minus 1 − cosine with another head, mean over heads. Below 0, doubling "
    "the scale changes a head by less than the difference between heads; a power law would not change at all"
)


def zoomed(lab: Lab, side: Side) -> Finding:
    """Return how much more a head differs from itself at half the resolution than from another head."""
    energy, half, quarter = finite_heads(lab, "wavelet_energy", "scale_half", "scale_quarter")
    if energy.shape[2] < 3:
        return Finding.not_applicable("the prompts are too short for three scales")
    cosines = lab.jackknife.of_means(lambda mean: np.array(octave_cosines(mean)), energy)
    itself, other = cosines[0], cosines[1]
    details = {
        "cosine with itself": itself.estimate,
        "with another head": other.estimate,
        "1 − cosine at half sampling": lab.mean(half.mean(1)),
        "1 − cosine at a quarter of the sampling": lab.mean(quarter.mean(1)),
    }
    return Finding.of((other - itself).estimate, "difference of cosines", side=side, details=details)


@claim(
    3, "wavelets.scale-invariance", "Heads are scale-invariant",
    "The behaviour of attention heads is scale-invariant.",
    f"{ZOOM}. Details: the paper's own measure, for which no value means no effect; the paper reports 0.04 to 0.06 at "
    "half and 0.09 to 0.10 at a quarter of the sampling",
)  # fmt: skip
def scale_invariance(lab: Lab) -> Finding:
    return zoomed(lab, Side.BELOW) if lab.rotary else Finding.not_applicable(NO_ROPE)


@claim(
    3, "wavelets.rope-only", "Only RoPE makes heads scale-invariant",
    "Scale-invariant behaviour is unique to RoPE.",
    f"only on models without RoPE, which could be counterexamples: {ZOOM}. Claimed to be above 0 there",
)  # fmt: skip
def rope_only(lab: Lab) -> Finding:
    if lab.rotary:
        return Finding.not_applicable("a test needs a model without RoPE, and this one has RoPE")
    return zoomed(lab, Side.ABOVE)


untestable(
    4, "wavelets.phases", "Wavelets emerge in phases",
    "These properties emerge through distinct phases during training.",
    "one checkpoint has no training dynamics: a test needs checkpoints of one training run",
)  # fmt: skip


@claim(
    5, "wavelets.uncertainty", "Heads trade position for frequency",
    "Attention heads adhere to the uncertainty principle: heads that are sharp in position are spread in frequency.",
    "correlation over heads of the entropy of attention by offset with the entropy of its power spectrum; claimed to "
    "be below 0, no trade-off. A bound on the sum of the entropies would hold for any profile: only the trade-off can "
    "fail. The paper reports −0.42 to −0.74 on four RoPE models",
    decided="the profile is mirrored at offset 0 before its spectrum is computed, after the verdict (contradicted) "
    "with a window that was 0 at offset 0, where most attention is, had been seen",
)  # fmt: skip
def uncertainty(lab: Lab) -> Finding:
    if not lab.rotary:
        return Finding.not_applicable(NO_ROPE)
    position, frequency = finite_heads(lab, "entropy_position", "entropy_spectrum")
    correlation = correlated(lab.jackknife, position, frequency)
    return Finding.of(correlation, "correlation", side=Side.BELOW, details={"heads": position.shape[1]})


untestable(
    6, "wavelets.effective", "Wavelets make models effective",
    "The effectiveness of transformers stems from such decompositions.",
    "a test needs models with and without such decompositions after the same training, and a measure of their "
    "effectiveness",
)  # fmt: skip

untestable(
    6, "wavelets.optimal", "The decompositions are optimal",
    "Transformers develop decompositions that are optimal.",
    "optimality cannot be decided from one decomposition: a test needs the objective and the alternatives, and the "
    "abstract names neither",
)  # fmt: skip
