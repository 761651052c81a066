"""Sampled rows of logits -> the few numbers per row that everything later is computed from.

    log R_n = log Σ_{δ<n} e^{s(δ)}     a row cut to its nearest n body keys
    log Z   = log( R_{n_p} + e^σ + e^{s_aux} )

Sums in float64, always in log space. `References` are the late rows, which can be cut to any length; `Rows` are those
and the measured queries together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from posleak.errors import CheckError, UnsupportedError

from .call import Call
from .plan import Plan

NEVER = -torch.inf
"""log 0: a key that is not there."""

UNDERFLOW = 1e-30
"""Below this, terms come near the smallest normal float32 and lose their digits."""

ROUNDING = 64 * torch.finfo(torch.float32).eps
"""Relative rounding of a logit, with room (rotations are float32 in any model); e^s is off by |s| times that."""


@dataclass(frozen=True)
class Sight:
    """What rows may see: body [P] = n_p, the number of visible keys j ≥ 1; origin [P] or [H, P]: is key 0 visible?"""

    body: Tensor
    origin: Tensor

    def __getitem__(self, rows: slice) -> Sight:
        return Sight(self.body[rows], self.origin[..., rows])


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
class References:
    """The late rows r of one layer.

    s, partition  [B, H, R + 1, T]  logits by offset and log R_{δ + 1}; the last row is the anchor, which only gives ô
    sight         n_r and the sight of key 0, [R]
    sigma         [B, H, R]         logit of key 0 (−inf where it is out of sight)
    o_hat         [B, H, R]         log ô: an ordinary key at offset n_r, mean of e^s over the rows later than r
    s_aux         [H, 1] or None
    """

    s: Tensor
    partition: Tensor
    sight: Sight
    sigma: Tensor
    o_hat: Tensor
    s_aux: Tensor | None

    @property
    def body(self) -> Tensor:
        """log R_{n_r} [B, H, R]"""
        return at_cut(self.partition[:, :, :-1], self.sight.body[:, None])[..., 0]

    @property
    def log_z(self) -> Tensor:
        """[B, H, R]"""
        return add(add(self.body, self.sigma), self.s_aux)

    def cut(self, n: Tensor) -> Tensor:
        """log R_n of every row [B, H, R, Q] for lengths n [Q]."""
        return at_cut(self.partition[:, :, :-1], n.expand(len(self.sight.body), -1))

    def ordinary(self, n: Tensor) -> Tensor:
        """log o = s_r(n) [B, H, R, Q]: the key of r at the offset where key 0 stands for a query with n body keys."""
        return take(self.s[:, :, :-1], n.expand(len(self.sight.body), -1))

    def carried(self, seen: Sight) -> Tensor:
        """log k [B, H, R, Q], k = max(o + κ, 0), κ = e^{σ_r} − ô: the position-0 term of r at the place where i has it.

        κ = 0 where r does not see key 0, and where it is within rounding of 0: left alone, that noise would be weighed
        against the few keys of an early query and drown them. k = 0 where i does not see key 0. Where i and r see
        equally many keys nothing moves, and k is e^{σ_r} itself.
        """
        sees_r, sees_i = self.sight.origin[..., None], seen.origin[..., None, :]
        o, sigma, o_hat = self.ordinary(seen.body), self.sigma[..., None], self._visible_o_hat[..., None]
        top = torch.maximum(torch.maximum(o, sigma), o_hat)
        origin, ordinary = (sigma - top).exp(), (o_hat - top).exp()
        kappa = origin - ordinary
        noise = ROUNDING * sigma.abs().clamp(min=1) * torch.maximum(origin, ordinary)
        kappa = kappa.masked_fill(kappa.abs() <= noise.nan_to_num(), 0)
        log_k = ((o - top).exp() + kappa).clamp(min=0).log() + top
        return torch.where(self._unmoved(seen) & sees_r, sigma, log_k).masked_fill(~sees_i, NEVER)

    def hidden(self, seen: Sight) -> Tensor:
        """mask(i, r) = log Z_r − log(R_{n_i} + k) [B, H, R, Q]: what hiding the keys that i does not see does to r."""
        return self.log_z[..., None] - self.cut_with(self.carried(seen), seen)

    def cut_with(self, log_k: Tensor, seen: Sight) -> Tensor:
        """log(R_{n_i} + k), s_aux included."""
        return add(add(self.cut(seen.body), log_k), _wider(self.s_aux))

    def hidden_without_sink(self, seen: Sight) -> Tensor:
        """−[ log(R_{n_i} + o) − log(R_{n_r} + ô) ] [B, H, R, Q]: the same if position 0 were an ordinary key."""
        full = add(add(self.body, self._visible_o_hat), self.s_aux)[..., None]
        moved = self.ordinary(seen.body)
        o = torch.where(self._unmoved(seen) & self.sight.origin[..., None], self._visible_o_hat[..., None], moved)
        return full - self.cut_with(o.masked_fill(~seen.origin[..., None, :], NEVER), seen)

    @property
    def _visible_o_hat(self) -> Tensor:
        return self.o_hat.masked_fill(~self.sight.origin, NEVER)

    def _unmoved(self, seen: Sight) -> Tensor:
        return seen.body == self.sight.body[:, None]


@dataclass(frozen=True)
class Rows:
    """The sampled rows of one layer: measured queries i and the references that they are compared with.

    offsets [D]; sight: n_i and the sight of key 0, [Q]
    s       [B, H, Q, D]  logits by offset (−inf past the start of the prompt)
    sigma   [B, H, Q]     logit of key 0;  body: log Z'_i, s_aux not included
    virtual [B, H, Q]     how much an edit adds to log Z_i by keys that are not there; None without one
    """

    offsets: Tensor
    sight: Sight
    s: Tensor
    sigma: Tensor
    body: Tensor
    references: References
    virtual: Tensor | None = None

    @property
    def log_z(self) -> Tensor:
        """log Z_i [B, H, Q], virtual keys not included."""
        return add(add(self.body, self.sigma), self.references.s_aux)


def call_rows(call: Call, plan: Plan, start: int = 0) -> Rows:
    """One matmul for a call's sampled rows, then their reduction; `start` skips left padding. Errors name the layer."""
    rows = torch.tensor(plan.rows, device=call.query.device) + start
    visible = call.visibility.rows(rows)[:, 0, :, start:]
    try:
        if not bool((visible == visible[:1]).all()):
            raise UnsupportedError("prompts of one batch see different keys", remedy="batch prompts of equal length")
        virtual = None if call.virtual is None else call.virtual[:, :, rows[: len(plan.queries)]]
        logits = call.logits(rows, slice(start, None))
        return reduce_rows(logits, visible[0], plan, call.s_aux, call.unread, call.frozen, virtual)
    except (CheckError, UnsupportedError) as error:
        raise error.at(f"layer {call.index}") from error


def reduce_rows(
    logits: Tensor,
    visible: Tensor,
    plan: Plan,
    s_aux: Tensor | None = None,
    unread: Tensor | None = None,
    frozen: Tensor | None = None,
    virtual: Tensor | None = None,
) -> Rows:
    """logits [B, H, P, T] of the plan's rows, visible [P, T] -> Rows. P runs over `plan.rows`.

    unread [H], frozen [B, H], virtual [B, H, Q]: what edits do at position 0 and to the denominator (see Call).
    """
    check_finite(logits)
    positions = torch.tensor(plan.rows, device=logits.device)
    seen = sight(visible, positions)
    if unread is not None:
        seen = Sight(seen.body, seen.origin & ~unread[:, None])
    Q = len(plan.queries)
    query, late = slice(0, Q), slice(Q, len(plan.rows) - 1)
    offsets = torch.tensor(plan.offsets, device=logits.device)
    aux = None if s_aux is None else s_aux.detach().double()[:, None]
    s = by_offset(logits, positions)  # [B, H, P, T]
    partition = log_partition(s)
    body = at_cut(partition, seen.body[:, None])[..., 0]
    sigma = logits[..., 0].double()
    if frozen is not None:
        share = frozen.double()[..., None]
        sigma = torch.where(share.isnan(), sigma, (share / (1 - share)).log() + add(body, aux))
    sigma = sigma.masked_fill(~seen.origin, NEVER)
    late_s = s[:, :, Q:]
    o_hat = ordinary_key(late_s, seen.body[late])
    references = References(late_s, partition[:, :, Q:], seen[late], sigma[..., late], o_hat, aux)
    by_delta = take(s[:, :, query], offsets.expand(Q, -1))
    return Rows(offsets, seen[query], by_delta, sigma[..., query], body[..., query], references, virtual)


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


def at_cut(partition: Tensor, n: Tensor) -> Tensor:
    """log R_n from partition [B, H, P, T] for n [P, X]; −inf for n = 0."""
    return take(partition, n.clamp(min=1) - 1).masked_fill(n == 0, NEVER)


def ordinary_key(s: Tensor, n_r: Tensor) -> Tensor:
    """log ô [B, H, R]: mean of e^{s_r'(n_r)} over the rows r' > r in s [B, H, R + 1, T], the last being the anchor."""
    R = len(n_r)
    candidates = take(s, n_r.expand(R + 1, R))  # [B, H, r', r]
    later = torch.ones(R + 1, R, dtype=torch.bool, device=s.device).tril(-1)
    there = later & torch.isfinite(candidates)
    return candidates.masked_fill(~later, NEVER).logsumexp(-2) - there.sum(-2).double().log()


def add(log_x: Tensor, log_y: Tensor | None) -> Tensor:
    """log(x + y); y may be absent."""
    return log_x if log_y is None else torch.logaddexp(log_x, log_y)


def _wider(aux: Tensor | None) -> Tensor | None:
    return None if aux is None else aux[..., None]


def check_finite(logits: Tensor) -> None:
    """Refuse logits [B, H, ...] that are no numbers, naming the heads."""
    bad = ~torch.isfinite(logits).flatten(2).all(-1)
    if bool(bad.any()):
        prompts, heads = bad.any(1).nonzero().flatten().tolist(), bad.any(0).nonzero().flatten().tolist()
        raise CheckError(
            "the attention logits are NaN or infinite",
            got=f"heads {heads}, prompts {prompts} of the batch",
            remedy="load the model in a wider dtype (--dtype float32), or check its weights",
        )
