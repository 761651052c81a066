"""From prompts to numbers: unbiased powers, and the Gram matrices that they are functions of.

The expectation is over prompts. With x_b(i, δ) one component of prompt b,

    ⟨x, y⟩ = mean over (i, δ) of E[x] E[y],  estimated by  [ (Σ_b x_b)(Σ_b y_b) − Σ_b x_b y_b ] / (B (B − 1))

so that no prompt is multiplied with itself: the plain estimate E[x]² carries the noise of x as a bias that is larger
than many effects. power(x) = ⟨x, x⟩ in nats²; share(x) = ⟨x, total⟩ / ⟨total, total⟩. Everything is a function of the
Gram matrix G[b, b'] = mean over (i, δ) of x_b y_b', of which the diagonal is never used.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from posleak.arrays import Array


def gram_matrix(
    x: Float64[np.ndarray, "B *cells pairs"], y: Float64[np.ndarray, "B *cells pairs"]
) -> Float64[np.ndarray, "*cells B B"]:
    """x, y with NaN at pairs that do not exist -> mean over pairs of x_b y_b'."""
    there = np.isfinite(x[0]) & np.isfinite(y[0])
    count = there.sum(-1)[..., None, None]
    x, y = np.where(there, x, 0.0), np.where(there, y, 0.0)
    with np.errstate(invalid="ignore"):
        gram: Array = np.moveaxis(x, 0, -2) @ np.moveaxis(y, 0, -1) / count
    return gram


def unbiased(gram: Float64[np.ndarray, "*cells B B"]) -> Float64[np.ndarray, "*cells"]:
    """[(Σx)(Σy) − Σxy] / (B (B − 1)); NaN for one prompt: its noise looks like signal."""
    B = gram.shape[-1]
    if B < 2:
        return np.full(gram.shape[:-2], np.nan)
    off_diagonal = gram * (1 - np.eye(B))
    return np.asarray(off_diagonal.sum((-1, -2)) / (B * (B - 1)))
