"""The claims of arXiv 2410.18067: heads of RoPE models work like the filters of a wavelet transform.

A head's profile is its mean attention by offset; docs/metrics.md has the measures that are made of it.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from jaxtyping import Float64

from posleak.analyses.claims import catalogue
from posleak.analyses.claims.finding import Detail, Finding, Side
from posleak.analyses.claims.lab import Lab
from posleak.arrays import Array
from posleak.leakage import Estimate, combined
from posleak.leakage.across import correlated, mean_difference, octave_cosines
from posleak.papers import WAVELETS

claim = partial(catalogue.claim, paper=WAVELETS)
untestable = partial(catalogue.untestable, paper=WAVELETS)

NO_ROPE = "the claim is about models with RoPE, and this one has no rotary position encoding"
FEW_HEADS = "fewer than three heads have a profile that varies with the offset"
FEW_SCALES = "the prompts are too short for three scales"


untestable(
    1, "wavelets.compensate", "Wavelets compensate for RoPE's limits",
    "Wavelet-like properties compensate for theoretical limitations of the position encoding.",
    "what a property compensates for shows where it is missing: it takes models that were trained without it",
)  # fmt: skip


def heads(lab: Lab, *names: str) -> list[Float64[np.ndarray, "B heads *rest"]]:
    """Arrays (prompt, layer, head, …) of the metrics, all layers side by side: heads that have a number everywhere."""
    found = [lab.metric(name) for name in names]
    flat = [each.reshape(each.shape[0], -1, *each.shape[3:]) for each in found]
    known = np.all([np.isfinite(np.moveaxis(each, 1, 0)).reshape(each.shape[1], -1).all(1) for each in flat], axis=0)
    return [each[:, known] for each in flat]


def octaves(energy: Float64[np.ndarray, "*cells S"]) -> Float64[np.ndarray, "*cells"]:
    """A head's preferred scale: the mean number of a scale, weighted with the energy there. One more is an octave."""
    found: Array = energy @ np.arange(energy.shape[-1], dtype=float)
    return found


@claim(
    2, "wavelets.resolutions", "Heads work at many resolutions",
    "Attention heads implement multi-resolution processing, as wavelet transforms do.",
    "wavelet energy (db2) of each head's attention by offset; its preferred scale is the mean scale, in octaves; mean "
    "difference of that between two heads. Claimed to be more than 1 octave, the step from one scale of the transform "
    "to the next: heads that differ by less share one resolution",
)  # fmt: skip
def resolutions(lab: Lab) -> Finding:
    if not lab.rotary:
        return Finding.not_applicable(NO_ROPE)
    (energy,) = heads(lab, "wavelet_energy")
    if energy.shape[1] < 3:
        return Finding.not_applicable(FEW_HEADS)
    scale = octaves(energy)
    details: dict[str, Detail] = {"heads": energy.shape[1], "scales": energy.shape[2]}
    details["preferred scale"] = lab.jackknife.mean(scale.mean(1)).estimate
    details["width of one head, in octaves"] = lab.jackknife.of_means(_width, energy).estimate
    apart = lab.jackknife.of_means(mean_difference, scale).estimate
    return Finding.of(apart, "octaves", no_effect=1.0, details=details)


def _width(energy: Float64[np.ndarray, "heads S"]) -> float:
    """Standard deviation of the scale within a head, mean over heads."""
    number = np.arange(energy.shape[-1], dtype=float)
    return float(np.sqrt(np.maximum(energy @ number**2 - octaves(energy) ** 2, 0)).mean())


ZOOM = (
    "wavelet energy of each head by scale, beside the same one octave on, as if seen from twice as far: 1 − cosine "
    "with itself, minus 1 − cosine with another head, mean over heads. Below 0, twice the scale changes a head by less "
    "than taking another head does; it would not change a power law at all"
)


def zoomed(lab: Lab, side: Side) -> Finding:
    """How much more a head differs from itself at half the resolution than from another head."""
    energy, half, quarter = heads(lab, "wavelet_energy", "scale_half", "scale_quarter")
    if energy.shape[1] < 3:
        return Finding.not_applicable(FEW_HEADS)
    if energy.shape[2] < 3:
        return Finding.not_applicable(FEW_SCALES)
    cosines = lab.jackknife.of_means(lambda mean: np.array(octave_cosines(mean)), energy)
    itself, other = cosines[0], cosines[1]
    sensitivity: dict[str, Estimate] = {
        f"1 − cosine at {name} sampling": lab.jackknife.mean(each.mean(1)).estimate
        for name, each in (("half", half), ("a quarter of the", quarter))
    }
    details: dict[str, Detail] = {"cosine with itself": itself.estimate, "with another head": other.estimate}
    effect = combined(lambda own, others: others - own, itself, other).estimate
    return Finding.of(effect, "difference of cosines", side=side, details={**details, **sensitivity})


@claim(
    3, "wavelets.scale-invariance", "Heads are scale-invariant",
    "The behaviour of attention heads is scale-invariant.",
    f"{ZOOM}. The details have the paper's own measure, for which no value means no effect: it reports 0.04 to 0.06 at "
    "half and 0.09 to 0.10 at a quarter of the sampling",
)  # fmt: skip
def scale_invariance(lab: Lab) -> Finding:
    return zoomed(lab, Side.BELOW) if lab.rotary else Finding.not_applicable(NO_ROPE)


@claim(
    3, "wavelets.rope-only", "Only RoPE makes heads scale-invariant",
    "Scale-invariant behaviour is unique to RoPE.",
    f"only on models without RoPE, which would be counterexamples: {ZOOM}. Claimed to be above 0 there",
)  # fmt: skip
def rope_only(lab: Lab) -> Finding:
    if lab.rotary:
        return Finding.not_applicable("a model with RoPE cannot tell what others do: this takes one without")
    return zoomed(lab, Side.ABOVE)


untestable(
    4, "wavelets.phases", "Wavelets emerge in phases",
    "These properties emerge through distinct phases during training.",
    "one checkpoint has no training dynamics: it takes checkpoints of one training",
)  # fmt: skip


@claim(
    5, "wavelets.uncertainty", "Heads trade place for frequency",
    "Attention heads adhere to the uncertainty principle: what is sharp in position is spread in frequency.",
    "correlation over heads of the entropy of attention by offset with that of its power spectrum; claimed to be below "
    "0, which is no trade. A bound on the sum of two entropies would hold for any profile: only the trade can fail. "
    "The paper reports −0.42 to −0.74 on four RoPE models",
)  # fmt: skip
def uncertainty(lab: Lab) -> Finding:
    if not lab.rotary:
        return Finding.not_applicable(NO_ROPE)
    place, frequency = heads(lab, "entropy_position", "entropy_spectrum")
    if place.shape[1] < 3:
        return Finding.not_applicable(FEW_HEADS)
    return Finding.of(
        correlated(lab.jackknife, place, frequency), "correlation", side=Side.BELOW, details={"heads": place.shape[1]}
    )


untestable(
    6, "wavelets.effective", "Wavelets make models effective",
    "The effectiveness of transformers stems from such decompositions.",
    "what a model's effectiveness stems from takes models with and without them that were trained alike, and a measure "
    "of their effectiveness",
)  # fmt: skip

untestable(
    6, "wavelets.optimal", "The decompositions are optimal",
    "Transformers develop decompositions that are optimal.",
    "that a decomposition is optimal cannot be seen from one of them: it takes the objective and the others, and the "
    "abstract names neither",
)  # fmt: skip
