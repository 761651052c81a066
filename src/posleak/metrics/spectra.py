"""Attention by offset as a signal: frequencies and scales, after "Beyond Position" (arXiv 2410.18067).

The paper describes attention heads as filters of different resolution. A profile p(δ) is the mean attention of a head
at offset δ = 0 … D − 1. Its Fourier spectrum shows how fast it changes, its wavelet transform at which scales.

Undefined results are NaN: shares of a constant profile, and everything about a profile of zeros.
"""

from __future__ import annotations

import numpy as np
import pywt
from jaxtyping import Float64
from scipy.special import entr

BANDS = (0.25, 0.75)
"""Upper ends of the low and the middle band, as shares of the highest frequency."""

WAVELET, MODE = "db2", "symmetric"
"""Daubechies' wavelet with two vanishing moments; profiles are mirrored at their ends. Periodic continuation would have
a jump from the small values at the end to the large ones at offset 0, which would dominate the detail."""

MOST_SCALES = 6
SHORTEST_PROFILE = 16
"""Fewest offsets: shorter profiles have at most two scales, and few frequencies per band."""

FLAT = 1e-12
"""Values up to this, relative to the largest of a profile, count as 0."""


def power_spectrum(p: Float64[np.ndarray, "*cells D"]) -> Float64[np.ndarray, "*cells half"]:
    """Return |FFT|² of (x − mean x) · Hann at the frequencies k / M, k = 1 … D − 1, in cycles per token; M = 2D − 1.

    x is the profile mirrored at offset 0, p(|δ|), δ = −(D − 1) … D − 1. The Hann window suppresses the jump at the
    ends; on a profile that is not mirrored it would be 0 at offset 0 and suppress the nearest tokens. A cosine at
    frequency k appears at k − 1, k and k + 1, with powers 1 : 4 : 1. A constant has no power.
    """
    D = _length(p)
    mirrored = np.concatenate([p[..., :0:-1], p], axis=-1)
    varying = mirrored - mirrored.mean(-1, keepdims=True)
    varying = np.where(np.abs(varying).max(-1, keepdims=True) > FLAT * _largest(p), varying, 0.0)
    window = 0.5 + 0.5 * np.cos(2 * np.pi * np.arange(1 - D, D) / (2 * D - 1))
    return np.asarray(np.abs(np.fft.rfft(varying * window)[..., 1:]) ** 2)


def band_shares(P: Float64[np.ndarray, "*cells half"]) -> Float64[np.ndarray, "*cells 3"]:
    """Return the shares of power at low, middle and high frequencies: (0, ¼], (¼, ¾] and (¾, 1] of the highest one.

    The highest frequency is (2D − 2) / (2D − 1) of the Nyquist frequency, half a cycle per token.
    """
    low, middle = (int(np.floor(edge * P.shape[-1])) for edge in BANDS)
    power = np.stack([P[..., :low].sum(-1), P[..., low:middle].sum(-1), P[..., middle:].sum(-1)], axis=-1)
    return _shares(power)


def selectivity(P: Float64[np.ndarray, "*cells half"]) -> Float64[np.ndarray, "*cells"]:
    """Return the power of the strongest frequency relative to all others: max P / (Σ P − max P); may be infinite."""
    most = P.max(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(most / (P.sum(-1) - most))


def entropy(x: Float64[np.ndarray, "*cells values"]) -> Float64[np.ndarray, "*cells"]:
    """Return −Σ q log q in nats, with q = x / Σ x and x ≥ 0; NaN if all x are 0."""
    return np.asarray(entr(_shares(x)).sum(-1))


def wavelets(
    p: Float64[np.ndarray, "*cells D"],
) -> tuple[Float64[np.ndarray, "*cells S"], Float64[np.ndarray, "*cells S"]]:
    """Return energy and entropy by scale of the multilevel db2 transform, at most MOST_SCALES scales.

    Scales are ordered from the finest; scale s is about 2^s offsets wide, s = 1 … S. The energy is a share of all
    detail energy; the entropy is that of the squared coefficients within the scale, in nats. Coarse scales
    have fewer coefficients, which bounds their entropy: compare heads, not scales.
    """
    _length(p)
    squares = [np.where(np.abs(c) > FLAT * _largest(p), c, 0.0) ** 2 for c in reversed(_transform(p)[1:])]
    energy = np.stack([square.sum(-1) for square in squares], axis=-1)
    return _shares(energy), np.stack([entropy(square) for square in squares], axis=-1)


def scale_sensitivity(p: Float64[np.ndarray, "*cells D"], factor: int) -> Float64[np.ndarray, "*cells"]:
    """Return 1 − cos of the wavelet coefficients of p(factor · k) and p(k), k = 1 … ⌊(D − 1) / factor⌋.

    It is exactly 0 for power laws p(δ) = δ^−a, which are invariant to scale, constants included. The paper does not say
    how its samplings are aligned, so this alignment is ours. NaN if one of the samplings is 0 everywhere, or has too
    few samples for one step of the transform.
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
        raise ValueError(f"a profile of {D} offsets is too short; expected at least {SHORTEST_PROFILE}")
    return D


def _largest(p: Float64[np.ndarray, "*cells D"]) -> Float64[np.ndarray, "*cells 1"]:
    return np.asarray(np.abs(p).max(-1, keepdims=True))


def _transform(p: Float64[np.ndarray, "*cells D"]) -> list[Float64[np.ndarray, "*cells _"]]:
    """Return the coarse remainder, then the details from the coarsest scale to the finest."""
    levels = min(pywt.dwt_max_level(p.shape[-1], WAVELET), MOST_SCALES)
    coefficients: list[np.ndarray] = pywt.wavedec(p, WAVELET, mode=MODE, level=levels, axis=-1)
    return coefficients


def _shares(x: Float64[np.ndarray, "*cells parts"]) -> Float64[np.ndarray, "*cells parts"]:
    total = x.sum(-1, keepdims=True)
    return np.asarray(x / np.where(total > 0, total, np.nan))


def _direction(x: Float64[np.ndarray, "*cells values"]) -> Float64[np.ndarray, "*cells values"]:
    norm = np.sqrt((x**2).sum(-1, keepdims=True))
    return np.asarray(x / np.where(norm > 0, norm, np.nan))
