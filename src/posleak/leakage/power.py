"""From prompts to numbers: unbiased powers, and the sums of products that they are functions of.

The expectation is over prompts. With x_b(i, δ) one component of prompt b,

    ⟨x, y⟩ = mean over (i, δ) of E[x] E[y],  estimated by  [ (Σ_b x_b)(Σ_b y_b) − Σ_b x_b y_b ] / (B (B − 1))

so that no prompt is multiplied with itself: the plain estimate E[x]² carries the noise of x as a bias that is larger
than many effects. power(x) = ⟨x, x⟩ in nats²; share(x) = ⟨x, total⟩ / ⟨total, total⟩.

With G[b, c] = mean over (i, δ) of x_b y_c, everything follows from the sum of each prompt's products with the others,
Σ_{c≠b} (G[b, c] + G[c, b]), and from the products G[b, c] + G[c, b] of the pairs that are left out together. These are
`products`: so many numbers as there are prompts and pairs, which grows with the prompts and not with their square, and
which can be averaged over heads and layers as they are.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from jaxtyping import Bool, Float64, Int64

from posleak.arrays import Array

NEIGHBOURS = 8
"""Each prompt is left out together with so many that follow it, in a ring; up to 17 prompts these are all pairs."""

BLOCK = 32
"""Prompts whose products with those that follow them are made at once."""


@cache
def pairs(prompts: int) -> tuple[Int64[np.ndarray, "pairs"], Int64[np.ndarray, "pairs"]]:
    """The prompts that are left out together: each with those that follow it in a ring, no pair twice."""
    first, step = np.meshgrid(np.arange(prompts), np.arange(1, min(NEIGHBOURS, prompts // 2) + 1))
    once = (2 * step < prompts) | (first < step)
    return first[once], (first + step)[once] % prompts


def products(
    x: Float64[np.ndarray, "B *cells pairs"], y: Float64[np.ndarray, "B *cells pairs"]
) -> Float64[np.ndarray, "*cells sums"]:
    """x, y with NaN at pairs of query and offset that do not exist -> of each prompt with the others, then of each of
    `pairs(B)`; both ways round, means over the pairs that exist."""
    there = np.isfinite(x[0]) & np.isfinite(y[0])
    ready = by_cell(x, there)
    return products_of(ready, ready if y is x else by_cell(y, there), there.sum(-1))


def by_cell(
    x: Float64[np.ndarray, "B *cells pairs"], there: Bool[np.ndarray, "*cells pairs"]
) -> Float64[np.ndarray, "*cells B pairs"]:
    """Prompts last but one, and 0 at pairs that do not exist."""
    return np.ascontiguousarray(np.moveaxis(np.where(there, x, 0.0), 0, -2))


def products_of(
    x: Float64[np.ndarray, "*cells B pairs"],
    y: Float64[np.ndarray, "*cells B pairs"],
    count: Int64[np.ndarray | np.int64, "*cells"],
) -> Float64[np.ndarray, "*cells sums"]:
    """The same of arrays that are ready; count: how many pairs of query and offset each cell has."""
    B, same = x.shape[-2], y is x
    if B <= 2 * NEIGHBOURS + 1:
        found = of_gram(x @ np.swapaxes(y, -1, -2))
    else:
        with_sum = (x @ y.sum(-2)[..., None])[..., 0]
        with_sum = 2 * with_sum if same else with_sum + (y @ x.sum(-2)[..., None])[..., 0]
        found = np.concatenate([with_sum - 2 * np.einsum("...bp,...bp->...b", x, y), *_along_ring(x, y)], axis=-1)
    with np.errstate(invalid="ignore"):
        return np.asarray(found / np.asarray(count)[..., None])


def _along_ring(x: Array, y: Array) -> list[Array]:
    """x_b y_c + x_c y_b of each prompt b with the c = b + 1, then b + 2, …, that follow it in a ring."""
    B, steps = x.shape[-2], np.arange(1, NEIGHBOURS + 1)
    found = np.empty((*x.shape[:-2], NEIGHBOURS, B))
    for first in range(0, B, BLOCK):
        last = min(first + BLOCK, B)
        rows, after = slice(first, last), np.arange(first, last + NEIGHBOURS) % B
        block = x[..., rows, :] @ np.swapaxes(y[..., after, :], -1, -2)
        if y is not x:
            block += y[..., rows, :] @ np.swapaxes(x[..., after, :], -1, -2)
        at = np.arange(last - first)
        found[..., rows] = block[..., at, at + steps[:, None]] * (2 if y is x else 1)
    return list(np.moveaxis(found, -2, 0))


def of_gram(gram: Float64[np.ndarray, "*cells B B"]) -> Float64[np.ndarray, "*cells sums"]:
    """The same from whole Gram matrices, of which the diagonal is not used."""
    first, second = pairs(gram.shape[-1])
    own = np.diagonal(gram, axis1=-2, axis2=-1)
    with_others = gram.sum(-1) + gram.sum(-2) - 2 * own
    return np.concatenate([with_others, gram[..., first, second] + gram[..., second, first]], axis=-1)


def unbiased(sums: Float64[np.ndarray, "*cells sums"], prompts: int) -> Float64[np.ndarray, "*cells"]:
    """[(Σx)(Σy) − Σxy] / (B (B − 1)); NaN for one prompt: its noise looks like signal."""
    if prompts < 2:
        return np.full(sums.shape[:-1], np.nan)
    return np.asarray(sums[..., :prompts].sum(-1) / (2 * prompts * (prompts - 1)))
