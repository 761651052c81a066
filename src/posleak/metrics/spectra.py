"""Attention by offset as a signal: frequencies and scales, after "Beyond Position" (arXiv 2410.18067).

The paper reads attention heads as filters that split their context by resolution. A profile p(δ) is the mean attention
that a head gives to the token δ places back, δ = 0 … D − 1. Its Fourier spectrum says how fast it changes, and its
wavelet transform says at which scales.

What has no answer is NaN: shares of a profile that does not vary, and everything about a profile of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pywt
from jaxtyping import Float64
from scipy.special import entr

BANDS = (0.25, 0.75)
"""Low, middle and high frequencies end here, as shares of the highest one."""

WAVELET, MODE = "db2", "symmetric"
"""Daubechies' wavelet with two vanishing moments; profiles are mirrored at their ends.

A profile is large at offset 0 and small at its end. Continued periodically it would have a jump there, and the jump
would be most of its detail; mirrored it has none.
"""

MOST_SCALES = 6

SHORTEST_PROFILE = 16
"""Shorter profiles have two scales at most, and hardly any frequencies in a band."""

FLAT = 1e-12
"""What is no more than this, beside the largest value of a profile, is rounding."""


@dataclass(frozen=True)
class Wavelets:
    """The detail of a profile by scale, the finest first; scale s is about 2^s offsets wide, s = 1 … S."""

    energy: Float64[np.ndarray, "*cells S"]  # share of all detail energy
    entropy: Float64[np.ndarray, "*cells S"]  # of the squared coefficients within the scale, in nats


def power_spectrum(p: Float64[np.ndarray, "*cells D"]) -> Float64[np.ndarray, "*cells half"]:
    """|FFT|² of (x − mean x) · Hann at the frequencies k / M, k = 1 … D − 1, in cycles per token; M = 2D − 1.

    x is the profile mirrored at offset 0, p(|δ|), δ = −(D − 1) … D − 1. The Hann window keeps the jump at the two ends
    out of the spectrum; laid over the profile as it is, it would be 0 at offset 0, where most attention is, and hide
    the nearest tokens. A cosine at frequency k appears at k − 1, k and k + 1, with powers 1 : 4 : 1. A constant has no
    power.
    """
    D = _length(p)
    mirrored = np.concatenate([p[..., :0:-1], p], axis=-1)
    varying = mirrored - mirrored.mean(-1, keepdims=True)
    varying = np.where(np.abs(varying).max(-1, keepdims=True) > FLAT * _largest(p), varying, 0.0)
    window = 0.5 + 0.5 * np.cos(2 * np.pi * np.arange(1 - D, D) / (2 * D - 1))
    return np.asarray(np.abs(np.fft.rfft(varying * window)[..., 1:]) ** 2)


def band_shares(P: Float64[np.ndarray, "*cells half"]) -> Float64[np.ndarray, "*cells 3"]:
    """Shares of the power at low, middle and high frequencies: (0, ¼], (¼, ¾] and (¾, 1] of the highest one.

    The highest frequency is nearly Nyquist's, half a cycle per token: (2D − 2) / (2D − 1) of it.
    """
    low, middle = (int(np.floor(edge * P.shape[-1])) for edge in BANDS)
    power = np.stack([P[..., :low].sum(-1), P[..., low:middle].sum(-1), P[..., middle:].sum(-1)], axis=-1)
    return _shares(power)


def selectivity(P: Float64[np.ndarray, "*cells half"]) -> Float64[np.ndarray, "*cells"]:
    """How much the strongest frequency stands out: max P / (Σ P − max P). Infinite if there is no other."""
    most = P.max(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(most / (P.sum(-1) - most))


def entropy(x: Float64[np.ndarray, "*cells values"]) -> Float64[np.ndarray, "*cells"]:
    """−Σ q log q in nats, with q = x / Σ x and no negative x: of a profile, positional; of a spectrum, spectral.

    It is 0 if one value has everything, and log of the number of values if all are equal. NaN if all are 0.
    """
    return np.asarray(entr(_shares(x)).sum(-1))


def wavelets(p: Float64[np.ndarray, "*cells D"]) -> Wavelets:
    """Multilevel transform with db2, as deep as the length allows, with 6 scales at most: energy and entropy by scale.

    Coarse scales have fewer coefficients, which bounds their entropy: compare it between heads, not between scales.
    """
    _length(p)
    squares = [np.where(np.abs(c) > FLAT * _largest(p), c, 0.0) ** 2 for c in reversed(_transform(p)[1:])]
    energy = np.stack([square.sum(-1) for square in squares], axis=-1)
    return Wavelets(energy=_shares(energy), entropy=np.stack([entropy(square) for square in squares], axis=-1))


def scale_sensitivity(p: Float64[np.ndarray, "*cells D"], factor: int) -> Float64[np.ndarray, "*cells"]:
    """How much the profile's form changes if it is sampled `factor` times as coarsely: 1 − cos of the two transforms.

    Compared are p(factor · k) and p(k) at k = 1 … ⌊(D − 1) / factor⌋, as all their wavelet coefficients side by side:
    equally many samples from the same start. It is 0 exactly for power laws p(δ) = δ^−a, a constant among them, which
    look the same at every scale, and grows with how much a profile depends on one. The paper does not say how its
    samplings are aligned, so this way is ours.

    NaN if one of the samplings is 0 everywhere, or has too few samples for one step of the transform.
    """
    samples = (_length(p) - 1) // factor
    if not pywt.dwt_max_level(samples, WAVELET):
        return np.full(p.shape[:-1], np.nan)
    coarse, fine = p[..., factor : factor * samples + 1 : factor], p[..., 1 : samples + 1]
    x, y = (_direction(np.concatenate(_transform(sampled), axis=-1)) for sampled in (coarse, fine))
    return np.asarray(((x - y) ** 2).sum(-1) / 2)  # 1 − x·y would cancel where they are nearly equal


def _length(p: Float64[np.ndarray, "*cells D"]) -> int:
    D = int(p.shape[-1])
    if D < SHORTEST_PROFILE:
        raise ValueError(f"a profile of {D} offsets has no spectrum to speak of; expected {SHORTEST_PROFILE} or more")
    return D


def _largest(p: Float64[np.ndarray, "*cells D"]) -> Float64[np.ndarray, "*cells 1"]:
    return np.asarray(np.abs(p).max(-1, keepdims=True))


def _transform(p: Float64[np.ndarray, "*cells D"]) -> list[Float64[np.ndarray, "*cells _"]]:
    """The coarse remainder, then the details from the coarsest scale to the finest."""
    levels = min(pywt.dwt_max_level(p.shape[-1], WAVELET), MOST_SCALES)
    found: list[np.ndarray] = pywt.wavedec(p, WAVELET, mode=MODE, level=levels, axis=-1)
    return found


def _shares(x: Float64[np.ndarray, "*cells parts"]) -> Float64[np.ndarray, "*cells parts"]:
    total = x.sum(-1, keepdims=True)
    return np.asarray(x / np.where(total > 0, total, np.nan))


def _direction(x: Float64[np.ndarray, "*cells values"]) -> Float64[np.ndarray, "*cells values"]:
    """x / ‖x‖."""
    norm = np.sqrt((x**2).sum(-1, keepdims=True))
    return np.asarray(x / np.where(norm > 0, norm, np.nan))
