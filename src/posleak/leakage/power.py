"""Unbiased powers, and the sums of products that they are computed from.

The expectation is over prompts. With x_b(i, δ) one component of prompt b,

    ⟨x, y⟩ = mean over (i, δ) of E[x] E[y],  estimated by  [ (Σ_b x_b)(Σ_b y_b) − Σ_b x_b y_b ] / (B (B − 1))

so that no prompt is multiplied by itself: the plug-in estimate of E[x]² is biased upwards by the variance of the mean,
which is larger than many effects. The mean over (i, δ) is weighted: norms (summary.py) differ in these weights.

    power(x) = ⟨x, x⟩ in nats²,   share(x) = ⟨x, total⟩ / ⟨total, total⟩

With G[b, c] = mean over (i, δ) of x_b y_c, powers and their jackknife replicates are functions of each prompt's sum of
products with the others, Σ_{c≠b} (G[b, c] + G[c, b]), and of the products G[b, c] + G[c, b] of the pairs of prompts
that are left out together. `products` returns both, along one axis `sums`. Its length grows linearly with the number of
prompts, and it is linear: it can be averaged over heads and layers.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from jaxtyping import Bool, Float64, Int64

from posleak.arrays import Array

NEIGHBOURS = 8
"""Number of following prompts, on a ring, that each prompt is left out with; up to 17 prompts these are all pairs."""

BLOCK_PROMPTS = 32
"""Number of prompts whose products with the following ones are computed at once."""


@cache
def prompt_pairs(prompts: int) -> tuple[Int64[np.ndarray, "pairs"], Int64[np.ndarray, "pairs"]]:
    """Return the pairs of prompts that are left out together: each prompt with those that follow it on a ring."""
    first, step = np.meshgrid(np.arange(prompts), np.arange(1, min(NEIGHBOURS, prompts // 2) + 1))
    once = (2 * step < prompts) | (first < step)
    return first[once], (first + step)[once] % prompts


def products(
    x: Float64[np.ndarray, "B *cells pairs"], y: Float64[np.ndarray, "B *cells pairs"]
) -> Float64[np.ndarray, "*cells sums"]:
    """Return the products of each prompt with all others, then of the `prompt_pairs(B)`, symmetrised.

    They are plain means over the pairs (query, offset) that exist; x and y are NaN at the others.
    """
    exists = np.isfinite(x[0]) & np.isfinite(y[0])
    ready = by_cell(x, exists)
    sums = sum_products(ready, ready if y is x else by_cell(y, exists))
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / exists.sum(-1)[..., None])


def by_cell(
    x: Float64[np.ndarray, "B *cells pairs"], exists: Bool[np.ndarray, "*cells pairs"]
) -> Float64[np.ndarray, "*cells B pairs"]:
    """Move the prompts to the last axis but one and set pairs that do not exist to 0."""
    return np.ascontiguousarray(np.moveaxis(np.where(exists, x, 0.0), 0, -2))


def sum_products(
    x: Float64[np.ndarray, "*cells B pairs"], y: Float64[np.ndarray, "*cells B pairs"]
) -> Float64[np.ndarray, "*cells sums"]:
    """Return the products of arrays from `by_cell`, as sums over the pairs (query, offset)."""
    B, same = x.shape[-2], y is x
    if B <= 2 * NEIGHBOURS + 1:
        return of_gram(x @ np.swapaxes(y, -1, -2))
    with_sum = (x @ y.sum(-2)[..., None])[..., 0]
    with_sum = 2 * with_sum if same else with_sum + (y @ x.sum(-2)[..., None])[..., 0]
    return np.concatenate([with_sum - 2 * np.einsum("...bp,...bp->...b", x, y), *_along_ring(x, y)], axis=-1)


def _along_ring(x: Array, y: Array) -> list[Array]:
    """Return x_b y_c + x_c y_b of each prompt b with the c = b + 1, then b + 2, …, that follow it on the ring."""
    B, steps = x.shape[-2], np.arange(1, NEIGHBOURS + 1)
    ring = np.empty((*x.shape[:-2], NEIGHBOURS, B))
    for first in range(0, B, BLOCK_PROMPTS):
        last = min(first + BLOCK_PROMPTS, B)
        rows, after = slice(first, last), np.arange(first, last + NEIGHBOURS) % B
        block = x[..., rows, :] @ np.swapaxes(y[..., after, :], -1, -2)
        if y is not x:
            block += y[..., rows, :] @ np.swapaxes(x[..., after, :], -1, -2)
        at = np.arange(last - first)
        ring[..., rows] = block[..., at, at + steps[:, None]] * (2 if y is x else 1)
    return list(np.moveaxis(ring, -2, 0))


def of_gram(gram: Float64[np.ndarray, "*cells B B"]) -> Float64[np.ndarray, "*cells sums"]:
    """Return the products from whole Gram matrices G; the diagonal is not used."""
    first, second = prompt_pairs(gram.shape[-1])
    own = np.diagonal(gram, axis1=-2, axis2=-1)
    with_others = gram.sum(-1) + gram.sum(-2) - 2 * own
    return np.concatenate([with_others, gram[..., first, second] + gram[..., second, first]], axis=-1)


def unbiased(sums: Float64[np.ndarray, "*cells sums"], prompts: int) -> Float64[np.ndarray, "*cells"]:
    """Return [(Σx)(Σy) − Σxy] / (B (B − 1)); NaN for one prompt, whose noise cannot be separated from the mean."""
    if prompts < 2:
        return np.full(sums.shape[:-1], np.nan)
    return np.asarray(sums[..., :prompts].sum(-1) / (2 * prompts * (prompts - 1)))
