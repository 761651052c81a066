"""Sampled rows of logits -> the few numbers per row that the split needs. Sums in float64, always in log space.

log R_n = log Σ_{δ<n} e^{s(δ)}     a row cut to its nearest n body keys (n runs over the plan's cuts)
log Z   = log( R_{n_p} + e^σ + e^{s_aux} )
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posleak.errors import CheckError, UnsupportedError
from posleak.probe import Plan

NEVER = -torch.inf
"""log 0: a key that is not there."""

UNDERFLOW = 1e-30
"""Below this, terms come near the smallest normal float32 and lose their digits."""


@dataclass(frozen=True)
class Sight:
    """What each sampled row may see: body [P] = n_p, the number of visible keys j ≥ 1; origin [P]: is key 0 visible?"""

    body: Tensor
    origin: Tensor


def sight(visible: Tensor, positions: Tensor) -> Sight:
    """Read n_p and the sight of key 0 off visible [P, T], and refuse a shape that offsets cannot describe.

    The visible body keys of a row must be its nearest ones, without a gap: true for causal attention, windows, chunks.
    """
    body = visible[:, 1:].sum(-1)
    keys = torch.arange(visible.shape[1], device=visible.device)
    nearest = (keys <= positions[:, None]) & (keys > (positions - body)[:, None])
    if not torch.equal(nearest[:, 1:], visible[:, 1:]):
        row = int(positions[(nearest[:, 1:] != visible[:, 1:]).any(-1)][0])
        future = bool(visible[positions == row][:, row + 1 :].any())
        raise UnsupportedError(
            "a query sees keys after itself" if future else "a query does not see its nearest keys without a gap",
            where=f"query {row}",
            expected="causal attention, whole, windowed or chunked",
            remedy="leakage at equal offsets is not defined for this attention pattern",
        )
    return Sight(body, visible[:, 0])


@dataclass(frozen=True)
class Rows:
    """The sampled rows of one layer, reduced; Q measured queries, R references, D offsets of the plan.

    offsets     [D]           δ
    n_i, n_r    [Q], [R]      visible body keys
    sees_i, sees_r  [Q], [R]  is key 0 visible
    s_i, s_r    [B, H, Q, D], [B, H, R, D]   logits by offset (−inf past the start of the prompt)
    sigma_i, sigma_r  [B, H, Q], [B, H, R]   logit of key 0 (−inf where it is out of sight)
    body_i      [B, H, Q]     log Z'_i without s_aux
    body_r      [B, H, R]     log R_{n_r}
    cut         [B, H, R, Q]  log R_{n_i} of row r
    o           [B, H, R, Q]  s_r(n_i)
    o_hat       [B, H, R]     log ô: the mean of e^{s(n_r)} over the rows later than r
    s_aux       [H, 1] or None
    """

    offsets: Tensor
    n_i: Tensor
    n_r: Tensor
    sees_i: Tensor
    sees_r: Tensor
    s_i: Tensor
    s_r: Tensor
    sigma_i: Tensor
    sigma_r: Tensor
    body_i: Tensor
    body_r: Tensor
    cut: Tensor
    o: Tensor
    o_hat: Tensor
    s_aux: Tensor | None


def reduce_rows(logits: Tensor, visible: Tensor, plan: Plan, s_aux: Tensor | None = None) -> Rows:
    """logits [B, H, P, T] of the plan's rows, visible [P, T] -> Rows. P runs over `plan.rows`."""
    _check_finite(logits)
    positions = torch.tensor(plan.rows, device=logits.device)
    seen = sight(visible, positions)
    Q, R = len(plan.queries), len(plan.references)
    query, late = slice(0, Q), slice(Q, Q + R)
    offsets = torch.tensor(plan.offsets, device=logits.device)
    s = by_offset(logits, positions)  # [B, H, P, T]
    partition = log_partition(s)  # [B, H, P, T]: at index n − 1, log R_n
    n = seen.body
    sigma = logits[..., 0].double().masked_fill(~seen.origin, NEVER)
    body = take(partition, n.clamp(min=1)[:, None] - 1)[..., 0].masked_fill(n == 0, NEVER)
    cuts = n[query].expand(R, Q)
    return Rows(
        offsets=offsets,
        n_i=n[query], n_r=n[late], sees_i=seen.origin[query], sees_r=seen.origin[late],
        s_i=take(s[:, :, query], offsets.expand(Q, -1)), s_r=take(s[:, :, late], offsets.expand(R, -1)),
        sigma_i=sigma[..., query], sigma_r=sigma[..., late],
        body_i=body[..., query], body_r=body[..., late],
        cut=take(partition[:, :, late], cuts.clamp(min=1) - 1).masked_fill(cuts == 0, NEVER),
        o=take(s[:, :, late], cuts),
        o_hat=ordinary_key(s[:, :, Q:], n[late]),
        s_aux=None if s_aux is None else s_aux.double()[:, None],
    )  # fmt: skip


def by_offset(logits: Tensor, positions: Tensor) -> Tensor:
    """s_p(δ) = s_{p, p−δ} for body keys, δ = 0 … T−1; −inf where the key would be position 0 or before."""
    T = logits.shape[-1]
    key = positions[:, None] - torch.arange(T, device=logits.device)
    s = logits.gather(-1, key.clamp(min=0).expand(*logits.shape[:2], -1, -1))
    return s.masked_fill_(key < 1, NEVER)


def log_partition(s: Tensor) -> Tensor:
    """log Σ_{δ'≤δ} e^{s(δ')}: terms in the dtype of the logits, the running sum in float64.

    A running sum of positive terms keeps its relative precision however small its first terms are, as long as they do
    not underflow; where a row spans so many nats that they would, the slower sum in log space takes over.
    """
    peak = s.amax(-1, keepdim=True)
    total = (s - peak).exp_().cumsum(-1, dtype=torch.float64)
    if float(total[..., 0].min()) < UNDERFLOW:
        return torch.logcumsumexp(s.double(), dim=-1)
    return total.log_().add_(peak)


def take(s: Tensor, index: Tensor) -> Tensor:
    """s [B, H, P, T] at index [P, X] along the last axis, in float64."""
    return s.gather(-1, index.expand(*s.shape[:2], -1, -1)).double()


def ordinary_key(s: Tensor, n_r: Tensor) -> Tensor:
    """log ô [B, H, R]: mean of e^{s_r'(n_r)} over the rows r' > r in s [B, H, R + 1, T], the last being the anchor."""
    R = len(n_r)
    candidates = take(s, n_r.expand(R + 1, R))  # [B, H, r', r]
    later = torch.ones(R + 1, R, dtype=torch.bool, device=s.device).tril(-1)
    there = later & torch.isfinite(candidates)
    return candidates.masked_fill(~later, NEVER).logsumexp(-2) - there.sum(-2).double().log()


def _check_finite(logits: Tensor) -> None:
    bad = ~torch.isfinite(logits).flatten(2).all(-1)
    if bool(bad.any()):
        prompts, heads = bad.any(1).nonzero().flatten().tolist(), bad.any(0).nonzero().flatten().tolist()
        raise CheckError(
            "the attention logits are NaN or infinite",
            got=f"heads {heads}, prompts {prompts} of the batch",
            remedy="load the model in a wider dtype (--dtype float32), or check its weights",
        )
