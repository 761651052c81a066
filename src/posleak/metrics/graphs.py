"""Attention as a graph: sinks and reference frames, after "What are you sinking?" (arXiv 2508.02546).

Tokens are nodes, and a query has edges to the keys that it attends to. The paper asks where the edges meet: in one
token (a centralized frame), in several (distributed), or at both ends of the text (bidirectional).

A[i, j] is the attention of query i to key j, for example averaged over heads. A row sums to 1, or to less in a head
with a learned sink logit. The attention of a token to itself is ignored, except in `kl_reduction`, where a row is a
distribution over all keys that its query sees.

In long texts some rows represent all: each represents itself and the positions since the row before. Keys are never
grouped.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from posleak.leakage.summary import SINK_ATTENTION, SINK_RATIO

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
class AttentionGraph:
    """The graph of an attention matrix A over n tokens, or of several matrices with the same visible keys.

    A         float64 [*cells, P, n]
    visible   bool [P, n]: whether the query of a row may see a key
    rows      int64 [P]: query positions of the rows, increasing; the last one is n − 1
    """

    A: Float64[np.ndarray, "*cells P n"]
    visible: Bool[np.ndarray, "P n"]
    rows: Int64[np.ndarray, "P"]

    def __post_init__(self) -> None:
        if self.n < 2:
            raise ValueError(f"attention of {self.n} token(s) is not a graph; expected at least 2 queries and keys")
        if len(self.rows) != self.A.shape[-2] or self.rows[-1] != self.n - 1:
            raise ValueError(
                f"attention has {self.A.shape[-2]} rows for {self.n} queries; `rows` must give the query of each row "
                "and end with the last query"
            )

    @property
    def n(self) -> int:
        """The number of keys."""
        return int(self.A.shape[-1])

    @cached_property
    def weights(self) -> Int64[np.ndarray, "P"]:
        """The number of queries that each row represents."""
        return np.diff(self.rows, prepend=-1)

    @cached_property
    def incoming(self) -> Float64[np.ndarray, "*cells n"]:
        """The total attention that key j receives from the other queries: Σ_{i≠j} A_ij."""
        others = without_self(self.A, self.rows)
        return np.asarray(np.einsum("...ij,i->...j", others, self.weights.astype(np.float64)))

    @cached_property
    def in_degrees(self) -> Int64[np.ndarray, "*cells τ n"]:
        """The number of other queries that give key j more than τ, for each τ of THRESHOLDS."""
        others, count = without_self(self.A, self.rows), self.weights.astype(np.float32)  # exact up to 2^24 queries
        edges = ((others > threshold).astype(np.float32) for threshold in THRESHOLDS)
        return np.stack([np.einsum("...ij,i->...j", edge, count) for edge in edges], axis=-2).astype(np.int64)

    def star(self) -> Float64[np.ndarray, "*cells τ"]:
        """Return the star-likeness max_j d_j / (n − 1), with d_j the in-degree of key j.

        It is 1 if all other tokens have an edge to one key, whatever other edges they have.
        """
        return np.asarray(self.in_degrees.max(-1) / (self.n - 1))

    def centralisation(self) -> Float64[np.ndarray, "*cells τ"]:
        """Return Freeman's centralisation of the in-degrees: Σ_j (max d − d_j) / (n − 1)².

        Freeman divides by the largest possible sum. In a directed graph it belongs to the star in which n − 1 nodes
        have one edge, to the same node: (n − 1)². (In an undirected graph it would be (n − 1)(n − 2), because there the
        outer nodes have degree 1.) So only a star has 1, and 0 means that all keys have equally many edges.
        """
        degrees = self.in_degrees
        return np.asarray((degrees.max(-1, keepdims=True) - degrees).sum(-1) / (self.n - 1) ** 2)

    def concentration(self, percentile: float = PERCENTILE) -> Float64[np.ndarray, "*cells"]:
        """Return the share of incoming attention that goes to the sink set: the keys that receive most.

        The set has as many keys as lie at or above the percentile when all values differ, and no more where values are
        equal. So uniform attention is not concentrated: 13 of 128 equal keys receive 13 / 128. NaN where no key
        receives anything from another token.
        """
        below = int(np.ceil(np.round(percentile / 100 * (self.n - 1), 9)))  # 0.55 · 100 is 55.00000000000001
        most, total = np.partition(self.incoming, below, axis=-1)[..., below:].sum(-1), self.incoming.sum(-1)
        return np.asarray(most / np.where(total > 0, total, np.nan))

    def reference_tokens(self) -> Float64[np.ndarray, "*cells"]:
        """Return the number of keys that receive more than REFERENCE on average over all n − 1 other queries.

        A query that cannot see the key counts as 0. Otherwise the last keys of a causal text would be reference tokens
        of every head that attends to neighbouring tokens, because only neighbours see them.
        """
        return np.asarray((self.incoming > REFERENCE * (self.n - 1)).sum(-1), dtype=np.float64)

    def kl_reduction(self) -> Float64[np.ndarray, "*cells"]:
        """Return the relative drop of the divergence from uniform attention without the strongest anchor.

            1 − mean D' / mean D
            D_i = KL(a_i ‖ u_i) in nats: a_i row i, u_i uniform over the keys that i sees, itself included
            D'_i = the same without the anchor: its key is removed from a_i and u_i, and both are normalised

        The anchor is the key with the most incoming attention; means are over queries that see at least FEWEST_KEYS
        keys. 1: attention is uniform without the anchor. 0: the anchor contributes nothing. Below 0: the rest is less
        uniform than the whole. The paper reports such a reduction, but its exact form is not public, so this form is
        ours.

        Rows of heads with a learned sink logit are normalised first. A row with all weight on the anchor has D' = 0.
        NaN where attention is uniform.
        """
        enough = self.visible.sum(1) >= FEWEST_KEYS
        visible, count = self.visible[enough], self.weights[enough]
        a = np.where(self.visible, self.A, 0.0)[..., enough, :]
        anchor, keys = self.incoming.argmax(-1), visible.sum(1)
        others = keys - visible[:, anchor].transpose(*range(1, anchor.ndim + 1), 0)  # [*cells, rows]
        information = a * np.log(np.where(a > 0, a, 1.0))
        before = _divergence(a, information, keys)
        for array in (a, information):
            np.put_along_axis(array, anchor[..., None, None], 0.0, axis=-1)
        after = _divergence(a, information, others)
        whole = (before * count).sum(-1)
        return np.asarray(1 - (after * count).sum(-1) / np.where(whole > NOTHING * count.sum(), whole, np.nan))

    def received(self, far: int = 1) -> tuple[Float64[np.ndarray, "*cells n"], Int64[np.ndarray, "n"]]:
        """Return the mean attention to key j from queries that see it and are at least `far` tokens away, and the
        number of these queries; NaN without any."""
        if far < 1:
            raise ValueError(f"far is {far}; expected at least 1, because attention of a token to itself is ignored")
        distance = np.abs(self.rows[:, None] - np.arange(self.n))
        counted = (self.visible & (distance >= far)) * self.weights[:, None]
        queries = counted.sum(0)
        total = np.einsum("...ij,ij->...j", self.A, counted.astype(np.float64))
        return np.asarray(total / np.where(queries > 0, queries, np.nan)), queries

    def frame(self) -> dict[str, Float64[np.ndarray, "*cells"]]:
        """Return the reference frame: an exact decomposition of the attention to anchors into three types.

        An anchor is a key j whose c_j, the mean attention from queries at least n / 8 tokens away, is more than 5 times
        the median of c and above 0.02, as for the sink width. Keys that fewer than n / 8 such queries see are neither
        anchors nor in the median, because the mean of a few queries is mostly noise. With p_j = c_j / Σ c over the
        anchors, start the largest p in the first half of the text and end the largest in the second,

            bidirectional = 2 min(start, end)                     equal at both ends
            centralized   = max(start, end) − min(start, end)     what the strongest anchor has beyond that
            distributed   = 1 − start − end                       all other anchors
            no_frame      = 1 without an anchor, where the three others are 0; else 0
            anchors       = number of anchors
        """
        far = max(1, self.n // 8)
        c, queries = self.received(far)
        known = queries >= far
        c = c[..., known]
        median = np.median(c, axis=-1) if c.shape[-1] else np.full(c.shape[:-1], np.inf)
        anchor = (c > SINK_ATTENTION) & (c > SINK_RATIO * np.asarray(median)[..., None])
        weight = np.where(anchor, c, 0.0)
        total = np.where(anchor.any(-1), weight.sum(-1), np.nan)
        first = 2 * np.flatnonzero(known) < self.n
        start, end = (weight[..., half].max(-1, initial=0.0) / total for half in (first, ~first))
        frame = {
            "centralized": np.nan_to_num(np.abs(start - end)),
            "distributed": np.nan_to_num(np.maximum(1 - start - end, 0.0)),
            "bidirectional": np.nan_to_num(2 * np.minimum(start, end)),
            "no_frame": ~anchor.any(-1),
            "anchors": anchor.sum(-1),
        }
        return {name: np.asarray(values, dtype=np.float64) for name, values in frame.items()}


def fiedler(A: Float64[np.ndarray, "*cells n n"]) -> Float64[np.ndarray, "*cells"]:
    """Return the algebraic connectivity: the second smallest eigenvalue of the Laplacian L = diag(W 1) − W.

    W = (A + Aᵀ) / 2 without its diagonal; all rows are needed. It is 0 if the graph is not connected.
    """
    at = np.arange(A.shape[-1])
    others = without_self(A, at)
    laplacian = -(others + np.swapaxes(others, -1, -2)) / 2
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


def without_self(
    A: Float64[np.ndarray, "*cells P n"], rows: Int64[np.ndarray, "P"]
) -> Float64[np.ndarray, "*cells P n"]:
    """Return a copy with the attention of tokens to themselves set to 0."""
    others = A.copy()
    others[..., np.arange(len(rows)), rows] = 0.0
    return others


def _divergence(
    a: Float64[np.ndarray, "*cells rows n"],
    information: Float64[np.ndarray, "*cells rows n"],
    keys: Int64[np.ndarray, "*#cells rows"],
) -> Float64[np.ndarray, "*cells rows"]:
    """Return the KL divergence of a / Σa from uniform over `keys` keys, given a log a; 0 where a row is empty."""
    total = a.sum(-1)
    full = np.where(total > 0, total, 1.0)
    return np.where(total > 0, information.sum(-1) / full - np.log(full) + np.log(np.maximum(keys, 1)), 0.0)
