"""Attention as a graph: sinks and reference frames, after "What are you sinking?" (arXiv 2508.02546).

Tokens are nodes, and a query points to the keys that it attends to. The paper asks where these arrows meet: in one
token (a centralized frame), in several (distributed), or at both ends of the text (bidirectional).

A[i, j] is the attention of query i to key j, averaged over whatever the caller likes. A row adds up to 1, or to less in
a head with a learned sink logit, which takes a share without being a key. The attention of a token to itself is never
counted, except in `kl_reduction`, where a row is a distribution over all keys that its query sees.

`visible[i, j]` says whether query i may see key j. Where it is left out, attention is causal: j ≤ i.

Of a long text some rows stand for all: `rows` says which queries they are, increasing, the last one among them, and
each counts for itself and those since the row before. Keys are never grouped. Without `rows`, all queries are there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64

from posleak.leakage.profile import SINK_ATTENTION, SINK_RATIO

from .eigenvalues import eigenvalues

RowQueries = Int64[np.ndarray, "P"] | None
Visible = Bool[np.ndarray, "P n"] | None

THRESHOLDS = (0.001, 0.01, 0.05, 0.1, 0.2)
"""Attention above which there is an edge from a query to a key: the last axis of `star` and `centralisation`."""

PERCENTILE = 90.0
"""Keys from this percentile of incoming attention on are the sink set. The authors use 80, 90 and 95."""

REFERENCE = 0.1
"""A key that gets more than this from the other queries, on average, is a reference token."""

FEWEST_KEYS = 3
"""Rows that see fewer keys say nothing about uniformity: without the anchor, one key at most would be left."""

NOTHING = 1e-12
"""A mean divergence up to this, in nats, is 0 with rounding."""


@dataclass(frozen=True)
class ReferenceFrame:
    """How the attention of the anchors is split among the three types of frame, which add up to 1.

    NaN where there is no anchor.
    """

    centralized: Float64[np.ndarray, "*cells"]
    distributed: Float64[np.ndarray, "*cells"]
    bidirectional: Float64[np.ndarray, "*cells"]
    anchors: Int64[np.ndarray, "*cells"]  # how many keys are anchors


def in_degrees(A: Float64[np.ndarray, "*cells P n"], rows: RowQueries = None) -> Int64[np.ndarray, "*cells τ n"]:
    """How many other queries give key j more than τ, for each τ of `THRESHOLDS`."""
    others, count = _others(A, rows), _weights(A, rows).astype(np.float32)  # exact up to 2^24 queries
    degrees = [np.einsum("...ij,i->...j", (others > threshold).astype(np.float32), count) for threshold in THRESHOLDS]
    return np.stack(degrees, axis=-2).astype(np.int64)


def star(A: Float64[np.ndarray, "*cells P n"], rows: RowQueries = None) -> Float64[np.ndarray, "*cells τ"]:
    """How far the graph is a star: max_j d_j / (n − 1), with d_j the in-degree of key j.

    It is 1 if all other tokens point to one key, whatever else they point to.
    """
    return star_of(in_degrees(A, rows))


def star_of(degrees: Int64[np.ndarray, "*cells τ n"]) -> Float64[np.ndarray, "*cells τ"]:
    """The same from in-degrees."""
    return np.asarray(degrees.max(-1) / (degrees.shape[-1] - 1))


def centralisation(A: Float64[np.ndarray, "*cells P n"], rows: RowQueries = None) -> Float64[np.ndarray, "*cells τ"]:
    """Freeman's centralisation of the in-degree: Σ_j (max d − d_j) / (n − 1)².

    Freeman divides by the largest sum that n nodes allow. In a directed graph that is the star in which n − 1 nodes
    point to one and to nothing else: one node has n − 1 edges, n − 1 nodes have none, and the sum is (n − 1)². (For an
    undirected graph it would be (n − 1)(n − 2), because there the outer nodes have an edge each.) So 1 is a star and
    nothing else, and 0 means that all keys have equally many edges.
    """
    return centralisation_of(in_degrees(A, rows))


def centralisation_of(degrees: Int64[np.ndarray, "*cells τ n"]) -> Float64[np.ndarray, "*cells τ"]:
    """The same from in-degrees."""
    return np.asarray((degrees.max(-1, keepdims=True) - degrees).sum(-1) / (degrees.shape[-1] - 1) ** 2)


def fiedler(A: Float64[np.ndarray, "*cells n n"]) -> Float64[np.ndarray, "*cells"]:
    """Algebraic connectivity: the second smallest eigenvalue of the Laplacian L = diag(W 1) − W. It takes all rows.

    W = (A + Aᵀ) / 2 without its diagonal. It is 0 if the graph falls into parts that do not attend to each other.
    """
    others = _others(A)
    laplacian = -(others + np.swapaxes(others, -1, -2)) / 2
    at = np.arange(_tokens(A))
    laplacian[..., at, at] = -laplacian.sum(-1)
    return np.asarray(np.maximum(eigenvalues(torch.from_numpy(laplacian)).numpy()[..., 1], 0.0))


def received(
    A: Float64[np.ndarray, "*cells P n"], far: int = 1, visible: Visible = None, rows: RowQueries = None
) -> Float64[np.ndarray, "*cells n"]:
    """Mean attention that key j gets from the queries that see it and are at least `far` tokens away, |i − j| ≥ far.

    NaN where there is no such query.
    """
    counted = _counted(A, far, visible, rows) * _weights(A, rows)[:, None]
    queries = counted.sum(0)
    total = np.einsum("...ij,ij->...j", A, counted.astype(np.float64))
    return np.asarray(total / np.where(queries > 0, queries, np.nan))


def incoming(A: Float64[np.ndarray, "*cells P n"], rows: RowQueries = None) -> Float64[np.ndarray, "*cells n"]:
    """All attention that key j gets from the other queries: Σ_{i≠j} A_ij."""
    return np.asarray(np.einsum("...ij,i->...j", _others(A, rows), _weights(A, rows).astype(np.float64)))


def concentration(
    A: Float64[np.ndarray, "*cells P n"], percentile: float = PERCENTILE, rows: RowQueries = None
) -> Float64[np.ndarray, "*cells"]:
    """Share of all incoming attention that goes to the sink set: the keys that get most, from `percentile` on.

    The set has as many keys as lie at or above the percentile if no two are equal. Of equal keys no more are taken than
    that, so that uniform attention is not concentrated: 13 of 128 equal keys get 13 / 128. NaN where no key gets
    anything from another token.
    """
    n, found = _tokens(A), incoming(A, rows)
    below = int(np.ceil(np.round(percentile / 100 * (n - 1), 9)))  # 0.55 · 100 is 55.00000000000001
    total = found.sum(-1)
    return np.asarray(np.partition(found, below, axis=-1)[..., below:].sum(-1) / np.where(total > 0, total, np.nan))


def reference_tokens(A: Float64[np.ndarray, "*cells P n"], rows: RowQueries = None) -> Int64[np.ndarray, "*cells"]:
    """How many keys get more than `REFERENCE` on average over all n − 1 other queries.

    A query that cannot see the key counts with 0. If it did not count at all, the last keys of a causal text would be
    reference tokens of every head that looks at its neighbours: only neighbours see them.
    """
    return np.asarray((incoming(A, rows) > REFERENCE * (_tokens(A) - 1)).sum(-1), dtype=np.int64)


def kl_reduction(
    A: Float64[np.ndarray, "*cells P n"], visible: Visible = None, rows: RowQueries = None
) -> Float64[np.ndarray, "*cells"]:
    """How much of the distance from uniform attention is due to the strongest anchor: 1 − mean D' / mean D.

        D_i = KL(a_i ‖ u_i) in nats: a_i row i, u_i uniform over the keys that i sees, itself among them
        D'_i = the same without the anchor: its key is taken out of a_i and of u_i, and the rest is normalised

    The anchor is the key with the most incoming attention; means are over the queries that see at least three keys.
    1: without the anchor attention is uniform. 0: the anchor has nothing to do with it. Below 0: what is left is less
    uniform than all was. The paper reports such a reduction but its exact form is not public, so this one is ours.

    Rows are normalised first where a learned sink logit took a share. A row that gives all to the anchor has D' = 0.
    NaN where attention is uniform to begin with.
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


def frame(A: Float64[np.ndarray, "*cells P n"], visible: Visible = None, rows: RowQueries = None) -> ReferenceFrame:
    """The reference frame: the attention that goes to anchors, split exactly into three types.

    An anchor is a key j whose c_j, the mean attention from queries at least n / 8 tokens away, is more than 5 times the
    median of c and over 0.02, as for the width of a sink. Keys that fewer than n / 8 such queries see are neither
    anchors nor in the median: the mean of a few queries is mostly their noise. With p_j = c_j / Σ c over the anchors,
    start the largest p in the first half of the text and end the largest in the second,

        bidirectional = 2 min(start, end)                     as much at one end as at the other
        centralized   = max(start, end) − min(start, end)     what the strongest anchor has beyond that
        distributed   = 1 − start − end                       all other anchors
    """
    n = _tokens(A)
    far = max(1, n // 8)
    known = (_counted(A, far, visible, rows) * _weights(A, rows)[:, None]).sum(0) >= far
    c = received(A, far, visible, rows)[..., known]
    anchor = (c > SINK_ATTENTION) & (c > SINK_RATIO * _median(c)[..., None])
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


def _tokens(A: Float64[np.ndarray, "*cells P n"]) -> int:
    """n; a graph has at least two nodes."""
    n = int(A.shape[-1])
    if n < 2:
        raise ValueError(f"attention of {n} token(s) is no graph; expected at least 2 queries and keys")
    return n


def _rows(A: Float64[np.ndarray, "*cells P n"], rows: RowQueries) -> Int64[np.ndarray, "P"]:
    """Which queries the rows of A are."""
    if rows is None:
        rows = np.arange(_tokens(A))
    if len(rows) != A.shape[-2] or rows[-1] != _tokens(A) - 1:
        raise ValueError(f"attention has {A.shape[-2]} rows of {_tokens(A)} queries; rows must say which they are")
    return rows


def _weights(A: Float64[np.ndarray, "*cells P n"], rows: RowQueries) -> Int64[np.ndarray, "P"]:
    """How many queries each row stands for."""
    return np.diff(_rows(A, rows), prepend=-1)


def _others(A: Float64[np.ndarray, "*cells P n"], rows: RowQueries = None) -> Float64[np.ndarray, "*cells P n"]:
    """A copy without what queries give themselves."""
    others, own = A.copy(), _rows(A, rows)
    others[..., np.arange(len(own)), own] = 0.0
    return others


def _seen(A: Float64[np.ndarray, "*cells P n"], visible: Visible, rows: RowQueries) -> Bool[np.ndarray, "P n"]:
    return np.asarray(np.arange(_tokens(A)) <= _rows(A, rows)[:, None]) if visible is None else visible


def _counted(
    A: Float64[np.ndarray, "*cells P n"], far: int, visible: Visible, rows: RowQueries
) -> Bool[np.ndarray, "P n"]:  # fmt: skip
    """Pairs in which the query sees the key and is at least `far` away."""
    if far < 1:
        raise ValueError(f"far is {far}; expected at least 1, because a token's attention to itself is not counted")
    distance = np.abs(_rows(A, rows)[:, None] - np.arange(_tokens(A)))
    return np.asarray(_seen(A, visible, rows) & (distance >= far))


def _divergence(
    a: Float64[np.ndarray, "*cells rows n"],
    information: Float64[np.ndarray, "*cells rows n"],
    keys: Int64[np.ndarray, "*#cells rows"],
) -> Float64[np.ndarray, "*cells rows"]:
    """KL of a / Σa from the uniform distribution over `keys` keys, given a log a; 0 where a row is empty."""
    total = a.sum(-1)
    full = np.where(total > 0, total, 1.0)
    return np.where(total > 0, information.sum(-1) / full - np.log(full) + np.log(np.maximum(keys, 1)), 0.0)


def _median(c: Float64[np.ndarray, "*cells n"]) -> Float64[np.ndarray, "*cells"]:
    """The median; infinite where there is no key, so that nothing exceeds it."""
    return np.asarray(np.median(c, axis=-1)) if c.shape[-1] else np.full(c.shape[:-1], np.inf)
