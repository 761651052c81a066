"""Attention as a graph: sinks and reference frames, after "What are you sinking?" (arXiv 2508.02546).

Tokens are nodes, and a query has edges to the keys that it attends to. The paper asks where the edges meet: in one
token (a centralized frame), in several (distributed), or at both ends of the text (bidirectional).

A[i, j] is the attention of query i to key j, for example averaged over heads. A row sums to 1, or to less in a head
with a learned sink logit. The attention of a token to itself is ignored, except in `kl_reduction`, where a row is a
distribution over all keys that its query sees.

`visible[i, j]` is whether query i may see key j. Without it attention is causal: j ≤ i.

In long texts some rows represent all: `rows` are their query positions, increasing, the last position among them. Each
represents itself and the positions since the row before. Keys are never grouped. Without `rows`, A has all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from posleak.leakage.summary import SINK_ATTENTION, SINK_RATIO

Attention = Float64[np.ndarray, "*cells P n"]
Degrees = Int64[np.ndarray, "*cells τ n"]
RowQueries = Int64[np.ndarray, "P"] | None
Visible = Bool[np.ndarray, "P n"] | None

THRESHOLDS = (0.001, 0.01, 0.05, 0.1, 0.2)
"""Attention above which there is an edge from a query to a key: the axis τ of `star` and `centralisation`."""

PERCENTILE = 90.0
"""Keys from this percentile of incoming attention on form the sink set. The authors use 80, 90 and 95."""

REFERENCE = 0.1
"""A key that receives more than this from the other queries, on average, is a reference token."""

FEWEST_KEYS = 3
"""Rows that see fewer keys are ignored in `kl_reduction`: without the anchor at most one key would be left."""

NOTHING = 1e-12
"""A mean divergence up to this, in nats, counts as 0."""


@dataclass(frozen=True)
class ReferenceFrame:
    """Shares of the three types of frame in the attention to anchors; they sum to 1, and are NaN without anchors."""

    centralized: Float64[np.ndarray, "*cells"]
    distributed: Float64[np.ndarray, "*cells"]
    bidirectional: Float64[np.ndarray, "*cells"]
    anchors: Int64[np.ndarray, "*cells"]  # number of anchors


def in_degrees(A: Attention, rows: RowQueries = None) -> Degrees:
    """Return the number of other queries that give key j more than τ, for each τ of THRESHOLDS."""
    others, count = _others(A, rows), _weights(A, rows).astype(np.float32)  # exact up to 2^24 queries
    degrees = [np.einsum("...ij,i->...j", (others > threshold).astype(np.float32), count) for threshold in THRESHOLDS]
    return np.stack(degrees, axis=-2).astype(np.int64)


def star(degrees: Degrees) -> Float64[np.ndarray, "*cells τ"]:
    """Return the star-likeness max_j d_j / (n − 1), with d_j the in-degree of key j.

    It is 1 if all other tokens have an edge to one key, whatever other edges they have.
    """
    return np.asarray(degrees.max(-1) / (degrees.shape[-1] - 1))


def centralisation(degrees: Degrees) -> Float64[np.ndarray, "*cells τ"]:
    """Return Freeman's centralisation of the in-degrees: Σ_j (max d − d_j) / (n − 1)².

    Freeman divides by the largest possible sum. In a directed graph it belongs to the star in which n − 1 nodes have
    one edge, to the same node: (n − 1)². (In an undirected graph it would be (n − 1)(n − 2), because there the outer
    nodes have degree 1.) So only a star has 1, and 0 means that all keys have equally many edges.
    """
    return np.asarray((degrees.max(-1, keepdims=True) - degrees).sum(-1) / (degrees.shape[-1] - 1) ** 2)


def fiedler(A: Float64[np.ndarray, "*cells n n"]) -> Float64[np.ndarray, "*cells"]:
    """Return the algebraic connectivity: the second smallest eigenvalue of the Laplacian L = diag(W 1) − W.

    W = (A + Aᵀ) / 2 without its diagonal; all rows are needed. It is 0 if the graph is not connected.
    """
    others = _others(A)
    laplacian = -(others + np.swapaxes(others, -1, -2)) / 2
    at = np.arange(_tokens(A))
    laplacian[..., at, at] = -laplacian.sum(-1)
    return np.asarray(np.maximum(eigenvalues(torch.from_numpy(laplacian)).numpy()[..., 1], 0.0))


def eigenvalues(symmetric: Float64[Tensor, "*cells n n"]) -> Float64[Tensor, "*cells n"]:
    """Return the eigenvalues in increasing order, computed on the CPU, on one thread.

    For matrices of a few hundred rows several threads are not faster, and on a busy machine they wait for each other:
    with two busy processes on two cores, 0.5 ms became 7 ms, and 3 ms became 43 ms.
    """
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        values: Tensor = torch.linalg.eigvalsh(symmetric.cpu())
        return values
    finally:
        torch.set_num_threads(threads)


def received(
    A: Attention, far: int = 1, visible: Visible = None, rows: RowQueries = None
) -> Float64[np.ndarray, "*cells n"]:
    """Return the mean attention to key j from queries that see it and are at least `far` tokens away; else NaN."""
    counted = _counted(A, far, visible, rows) * _weights(A, rows)[:, None]
    queries = counted.sum(0)
    total = np.einsum("...ij,ij->...j", A, counted.astype(np.float64))
    return np.asarray(total / np.where(queries > 0, queries, np.nan))


def incoming(A: Attention, rows: RowQueries = None) -> Float64[np.ndarray, "*cells n"]:
    """Return the total attention that key j receives from the other queries: Σ_{i≠j} A_ij."""
    return np.asarray(np.einsum("...ij,i->...j", _others(A, rows), _weights(A, rows).astype(np.float64)))


def concentration(
    A: Attention, percentile: float = PERCENTILE, rows: RowQueries = None
) -> Float64[np.ndarray, "*cells"]:
    """Return the share of incoming attention that goes to the sink set: the keys that receive most.

    The set has as many keys as lie at or above the percentile when all values differ, and no more where values are
    equal. So uniform attention is not concentrated: 13 of 128 equal keys receive 13 / 128. NaN where no key receives
    anything from another token.
    """
    n, into = _tokens(A), incoming(A, rows)
    below = int(np.ceil(np.round(percentile / 100 * (n - 1), 9)))  # 0.55 · 100 is 55.00000000000001
    total = into.sum(-1)
    return np.asarray(np.partition(into, below, axis=-1)[..., below:].sum(-1) / np.where(total > 0, total, np.nan))


def reference_tokens(A: Attention, rows: RowQueries = None) -> Int64[np.ndarray, "*cells"]:
    """Return the number of keys that receive more than REFERENCE on average over all n − 1 other queries.

    A query that cannot see the key counts as 0. Otherwise the last keys of a causal text would be reference tokens of
    every head that attends to neighbouring tokens, because only neighbours see them.
    """
    return np.asarray((incoming(A, rows) > REFERENCE * (_tokens(A) - 1)).sum(-1), dtype=np.int64)


def kl_reduction(A: Attention, visible: Visible = None, rows: RowQueries = None) -> Float64[np.ndarray, "*cells"]:
    """Return how much the divergence from uniform attention drops without the strongest anchor: 1 − mean D' / mean D.

        D_i = KL(a_i ‖ u_i) in nats: a_i row i, u_i uniform over the keys that i sees, itself included
        D'_i = the same without the anchor: its key is removed from a_i and u_i, and both are normalised

    The anchor is the key with the most incoming attention; means are over queries that see at least FEWEST_KEYS keys.
    1: attention is uniform without the anchor. 0: the anchor contributes nothing. Below 0: the rest is less uniform
    than the whole. The paper reports such a reduction, but its exact form is not public, so this form is ours.

    Rows of heads with a learned sink logit are normalised first. A row with all weight on the anchor has D' = 0. NaN
    where attention is uniform.
    """
    seen = _seen(A, visible, rows)
    enough = seen.sum(1) >= FEWEST_KEYS
    a, seen, count = np.where(seen, A, 0.0)[..., enough, :], seen[enough], _weights(A, rows)[enough]
    anchor, keys = incoming(A, rows).argmax(-1), seen.sum(1)
    others = keys - seen[:, anchor].transpose(*range(1, anchor.ndim + 1), 0)  # [*cells, rows]
    information = a * np.log(np.where(a > 0, a, 1.0))
    before = _divergence(a, information, keys)
    for array in (a, information):
        np.put_along_axis(array, anchor[..., None, None], 0.0, axis=-1)
    after = _divergence(a, information, others)
    whole = (before * count).sum(-1)
    return np.asarray(1 - (after * count).sum(-1) / np.where(whole > NOTHING * count.sum(), whole, np.nan))


def frame(A: Attention, visible: Visible = None, rows: RowQueries = None) -> ReferenceFrame:
    """Return the reference frame: an exact decomposition of the attention to anchors into three types.

    An anchor is a key j whose c_j, the mean attention from queries at least n / 8 tokens away, is more than 5 times the
    median of c and above 0.02, as for the sink width. Keys that fewer than n / 8 such queries see are neither anchors
    nor in the median, because the mean of a few queries is mostly noise. With p_j = c_j / Σ c over the anchors, start
    the largest p in the first half of the text and end the largest in the second,

        bidirectional = 2 min(start, end)                     equal at both ends
        centralized   = max(start, end) − min(start, end)     what the strongest anchor has beyond that
        distributed   = 1 − start − end                       all other anchors
    """
    n = _tokens(A)
    far = max(1, n // 8)
    known = (_counted(A, far, visible, rows) * _weights(A, rows)[:, None]).sum(0) >= far
    c = received(A, far, visible, rows)[..., known]
    median = np.median(c, axis=-1) if c.shape[-1] else np.full(c.shape[:-1], np.inf)
    anchor = (c > SINK_ATTENTION) & (c > SINK_RATIO * np.asarray(median)[..., None])
    weight = np.where(anchor, c, 0.0)
    total = np.where(anchor.any(-1), weight.sum(-1), np.nan)
    first = 2 * np.flatnonzero(known) < n
    start, end = (weight[..., half].max(-1, initial=0.0) / total for half in (first, ~first))
    return ReferenceFrame(
        centralized=np.asarray(np.abs(start - end)),
        distributed=np.asarray(np.maximum(1 - start - end, 0.0)),
        bidirectional=np.asarray(2 * np.minimum(start, end)),
        anchors=np.asarray(anchor.sum(-1), dtype=np.int64),
    )


def _tokens(A: Attention) -> int:
    n = int(A.shape[-1])
    if n < 2:
        raise ValueError(f"attention of {n} token(s) is not a graph; expected at least 2 queries and keys")
    return n


def _rows(A: Attention, rows: RowQueries) -> Int64[np.ndarray, "P"]:
    if rows is None:
        rows = np.arange(_tokens(A))
    if len(rows) != A.shape[-2] or rows[-1] != _tokens(A) - 1:
        raise ValueError(
            f"attention has {A.shape[-2]} rows for {_tokens(A)} queries; `rows` must give the query of each row and "
            "end with the last query"
        )
    return rows


def _weights(A: Attention, rows: RowQueries) -> Int64[np.ndarray, "P"]:
    """Return the number of queries that each row represents."""
    return np.diff(_rows(A, rows), prepend=-1)


def _others(A: Attention, rows: RowQueries = None) -> Attention:
    """Return a copy with the attention of tokens to themselves set to 0."""
    others, own = A.copy(), _rows(A, rows)
    others[..., np.arange(len(own)), own] = 0.0
    return others


def _seen(A: Attention, visible: Visible, rows: RowQueries) -> Bool[np.ndarray, "P n"]:
    return np.asarray(np.arange(_tokens(A)) <= _rows(A, rows)[:, None]) if visible is None else visible


def _counted(A: Attention, far: int, visible: Visible, rows: RowQueries) -> Bool[np.ndarray, "P n"]:
    """Return the pairs in which the query sees the key and is at least `far` tokens away."""
    if far < 1:
        raise ValueError(f"far is {far}; expected at least 1, because attention of a token to itself is ignored")
    distance = np.abs(_rows(A, rows)[:, None] - np.arange(_tokens(A)))
    return np.asarray(_seen(A, visible, rows) & (distance >= far))


def _divergence(
    a: Float64[np.ndarray, "*cells rows n"],
    information: Float64[np.ndarray, "*cells rows n"],
    keys: Int64[np.ndarray, "*#cells rows"],
) -> Float64[np.ndarray, "*cells rows"]:
    """Return the KL divergence of a / Σa from uniform over `keys` keys, given a log a; 0 where a row is empty."""
    total = a.sum(-1)
    full = np.where(total > 0, total, 1.0)
    return np.where(total > 0, information.sum(-1) / full - np.log(full) + np.log(np.maximum(keys, 1)), 0.0)
