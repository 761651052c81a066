"""Reduction of sampled rows of logits to the few numbers per row from which all components are computed.

    log R_n = log( Σ_{δ<n} e^{s(δ)} + e^{s_aux} )    a row restricted to its nearest n body keys
    log S   = log Σ e^s over visible origin keys
    log Z   = log( R_{n_p} + S )
    log k   = log Σ e^{s̃_rj} over the origin keys visible to i, moved to their offsets from i

All sums are computed in log space and float64. `References` are the late rows, which can be restricted to any length;
`Rows` contains them and the measured queries.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from posleak.errors import CheckError, UnsupportedError

from .call import Call
from .placement import Placement, moved_logits
from .plan import PROFILE_POSITIONS, Plan

LOG_ZERO = -torch.inf
"""log 0: the logit of a key that does not exist or is not visible."""

MATMUL_LENGTHS = 96
"""Up to this number of lengths, sums are computed by one product with indicators; else by a running sum."""

UNDERFLOW = 1e-24
"""Smaller sums are computed in log space. Terms are at least 1e-38 of the peak of their row, and a row has up to a
million of them: 1e-32 in total, which is 1e-8 of this."""


@dataclass(frozen=True)
class VisibleKeys:
    """Visible keys of rows. body: n_p, the number of visible body keys;  origin: the visible origin keys (by head)"""

    body: Int[Tensor, "P"]
    origin: Bool[Tensor, "P m"] | Bool[Tensor, "H P m"]

    def __getitem__(self, rows: slice) -> VisibleKeys:
        return VisibleKeys(self.body[rows], self.origin[..., rows, :])

    def without_first(self, unread: Bool[Tensor, "H"] | None) -> VisibleKeys:
        """Return the visible keys if key 0 is hidden from the heads in `unread`."""
        if unread is None:
            return self
        origin = self.origin.expand(len(unread), *self.origin.shape).clone()
        origin[unread, :, 0] = False
        return VisibleKeys(self.body, origin)

    @property
    def count(self) -> Int[Tensor, "P"] | Int[Tensor, "H P"]:
        """m_p: the number of visible origin keys."""
        return self.origin.sum(-1)


def visible_keys(visible: Bool[Tensor, "P T"], positions: Int[Tensor, "P"], origin: int) -> VisibleKeys:
    """Return n_p and the visible origin keys. Raise UnsupportedError unless body keys are the nearest, without gaps.

    Causal attention, sliding windows and chunks satisfy this.
    """
    body = visible[:, origin:].sum(-1)
    keys = torch.arange(visible.shape[1], device=visible.device)
    nearest = (keys <= positions[:, None]) & (keys > (positions - body)[:, None])
    if not torch.equal(nearest[:, origin:], visible[:, origin:]):
        row = int(positions[(nearest[:, origin:] != visible[:, origin:]).any(-1)][0])
        future = bool(visible[positions == row][:, row + 1 :].any())
        raise UnsupportedError(
            "a query attends to later keys" if future else "the keys visible to a query have gaps",
            where=f"query {row}", expected="causal attention: full, windowed or chunked",
            remedy="this model cannot be measured: leakage at equal offsets is not defined for this attention pattern",
        )  # fmt: skip
    return VisibleKeys(body, visible[:, :origin])


@dataclass(frozen=True)
class Frame:
    """The visible keys of the plan's rows under one mask. Layers with the same mask share one instance.

    seen      n_p and the visible origin keys, [P]
    visible   the keys visible to references
    summed    the body keys that are summed: the visible ones of queries, and all earlier ones of references, which are
              restricted later;  unsummed: 0 for these keys, −inf for all others
    lengths   the numbers of body keys to which references will be restricted, increasing
    """

    positions: Int[Tensor, "P"]
    offsets: Int[Tensor, "D"]
    seen: VisibleKeys
    visible: Bool[Tensor, "R T"]
    summed: Bool[Tensor, "P T"]
    unsummed: Float[Tensor, "P T"]
    lengths: Int[Tensor, "n"]

    @classmethod
    def of(cls, visible: Bool[Tensor, "P T"], plan: Plan) -> Frame:
        """Compute the frame from the keys visible to the plan's rows."""
        positions = torch.tensor(plan.rows, device=visible.device)
        keys, Q = torch.arange(visible.shape[-1], device=visible.device), len(plan.queries)
        summed = torch.cat([visible[:Q], keys <= positions[Q:, None]]) & (keys >= plan.origin)
        seen = visible_keys(visible, positions, plan.origin)
        n_i, n_r, m_i = seen.body[:Q], seen.body[Q:], seen.count[:Q]
        windowed = n_r[n_r != positions[Q:] - plan.origin + 1]
        lengths = torch.cat([n_i, torch.minimum(n_i + m_i, n_r[:, None]).flatten(), windowed]).unique()
        offsets = torch.tensor(plan.offsets, device=visible.device)
        unsummed = torch.zeros(summed.shape, device=summed.device).masked_fill_(~summed, LOG_ZERO)
        return cls(positions, offsets, seen, visible[Q:], summed, unsummed, lengths)


@dataclass(frozen=True)
class References:
    """The reference rows r of one layer.

    weights   e^{s − peak} of body keys, 0 for all others
    whole     log of the sum over all body keys up to r
    seen      n_r and the visible origin keys, [R]
    first     logits of origin keys (−inf if not visible)
    """

    frame: Frame
    positions: Int[Tensor, "R"]
    logits: Float[Tensor, "B H R T"]
    weights: Float[Tensor, "B H R T"]
    peak: Float64[Tensor, "B H R 1"]
    whole: Float64[Tensor, "B H R"]
    seen: VisibleKeys
    first: Float64[Tensor, "B H R m"]
    s_aux: Float64[Tensor, "H 1"] | None

    @property
    def origin(self) -> int:
        """m: the origin width."""
        return self.first.shape[-1]

    @cached_property
    def keys(self) -> Float64[Tensor, "B H R"]:
        """log R_{n_r} without s_aux: the sum over visible body keys."""
        if torch.equal(self.seen.body, self.positions - self.origin + 1):
            return self.whole
        return torch.diagonal(self._sums(self.seen.body), dim1=-2, dim2=-1)

    @cached_property
    def body(self) -> Float64[Tensor, "B H R"]:
        """log R_{n_r}"""
        return add(self.keys, self.s_aux)

    @cached_property
    def log_z(self) -> Float64[Tensor, "B H R"]:
        """log Z_r"""
        return add(self.body, self.first.logsumexp(-1))

    def cut(self, n: Int[Tensor, "Q"]) -> Float64[Tensor, "B H R Q"]:
        """Compute log R_n of every row for lengths n; bit-identical to log R_{n_r} where n = n_r."""
        cut = add(self._sums(n), None if self.s_aux is None else self.s_aux[..., None])
        return torch.where(n == self.seen.body[:, None], self.body[..., None], cut)

    def _sums(self, n: Int[Tensor, "n"]) -> Float64[Tensor, "B H R n"]:
        """Compute log R_n without s_aux. The lengths of the frame are computed together, once."""
        lengths = self.frame.lengths
        at = torch.searchsorted(lengths, n).clamp(max=len(lengths) - 1)
        return self._known[..., at] if torch.equal(lengths[at], n) else self._sum(n)

    @cached_property
    def _known(self) -> Float64[Tensor, "B H R n"]:
        return self._sum(self.frame.lengths)

    def _sum(self, n: Int[Tensor, "n"]) -> Float64[Tensor, "B H R n"]:
        lengths, where = n.unique(return_inverse=True)
        if len(lengths) <= MATMUL_LENGTHS:
            sums = nearest_sums(self.weights, self.positions, lengths)  # [B, H, R, lengths]
            if float(sums[..., 0].min()) >= UNDERFLOW:
                return (sums.log() + self.peak)[..., where]
        offsets = torch.arange(self.logits.shape[-1], device=self.logits.device)
        return log_partition(gather_offsets(self.logits, self.positions, offsets, self.origin))[..., n - 1]

    def at_offsets(self, offsets: Int[Tensor, "D"]) -> Float64[Tensor, "B H R D"]:
        """Return s_r(δ); −inf before the start of the body."""
        return gather_offsets(self.logits, self.positions, offsets, self.origin).double()

    def by_offset(self, offsets: Int[Tensor, "D"]) -> Float64[Tensor, "B H D"]:
        """The mean attention of references to the visible body keys that each offset represents (`nearest_offsets`)."""
        B, H, R, T = self.weights.shape
        ends = tuple(nearest_offsets(offsets.tolist(), T))
        member = segments(tuple(self.positions.tolist()), T, ends, self.weights.device, self.weights.dtype)
        seen = self.weights if self.whole is self.keys else self.weights * self.frame.visible
        sums = torch.matmul(seen.permute(2, 0, 1, 3).reshape(R, B * H, T), member).view(R, B, H, -1)
        scale = (self.peak[..., 0] - self.log_z).movedim(2, 0)[..., None]
        return (sums.double().log() + scale).exp().mean(0)

    def without_sink(self, seen: VisibleKeys) -> Float64[Tensor, "B H R Q"]:
        """Compute the mask part as if origin keys were ordinary body keys.

        log of the sum over visible body keys, extended by m_r keys of mean weight, minus log R_{n_i + m_i}
        """
        n_r, ordinary = self.seen.body, self.seen.count.double() / self.seen.body
        full = add(self.keys + ordinary.log1p(), self.s_aux)[..., None]
        n = torch.minimum((seen.body + seen.count)[..., None, :], n_r[:, None])  # [R, Q] or [H, R, Q]
        every = n.unique()
        sums = self._sums(every)
        index = torch.searchsorted(every, n).expand(*sums.shape[:3], -1)
        part = add(sums.gather(-1, index), None if self.s_aux is None else self.s_aux[..., None])
        alike = (n == n_r[:, None]) & (self.seen.count == 0)[..., None]
        return (full - part).masked_fill(alike, 0)

    @cached_property
    def profile(self) -> Float64[Tensor, "B H first"]:
        """The mean attention of references to each of the first positions."""
        shown = min(self.logits.shape[-1], PROFILE_POSITIONS + self.origin)
        later = slice(self.origin, shown)
        body = self.logits[..., later].double().masked_fill(~self.frame.visible[:, later], LOG_ZERO)
        s = torch.cat([self.first, body], -1)
        return (s - self.log_z[..., None]).exp().mean(2)

    @cached_property
    def ordinary(self) -> Float64[Tensor, "B H"]:
        """The mean attention of references to a key of the second quarter of the prompt; NaN if none is visible."""
        N = self.logits.shape[-1]
        far = slice(max(N // 4, self.origin), N // 2)
        seen = self.frame.visible[:, far]
        sums = (self.weights[..., far] * seen).sum(-1, dtype=torch.float64).log() + self.peak[..., 0] - self.log_z
        return (sums.exp() / seen.sum(-1)).nanmean(-1)


@dataclass(frozen=True)
class Rows:
    """The sampled rows of one layer: measured queries i, and the references with which they are compared.

    seen     n_i and the visible origin keys, [Q]
    s        logits by offset (−inf before the start of the body)
    first    logits of origin keys;  body: log B_i, including s_aux
    moved    s̃_rj: logits of references with origin keys at their offsets from i (−inf: not visible to i)
    lent     log Σ e^s over lent keys, for queries and then references; None without a donor
    """

    offsets: Int[Tensor, "D"]
    seen: VisibleKeys
    s: Float64[Tensor, "B H Q D"]
    first: Float64[Tensor, "B H Q m"]
    body: Float64[Tensor, "B H Q"]
    moved: Float64[Tensor, "B H R Q m"]
    references: References
    lent: Float64[Tensor, "B H P"] | None = None

    @cached_property
    def log_z(self) -> Float64[Tensor, "B H Q"]:
        """log Z_i, without lent keys."""
        return add(self.body, self.first.logsumexp(-1))

    @cached_property
    def cut(self) -> Float64[Tensor, "B H R Q"]:
        """log R_{n_i}"""
        return self.references.cut(self.seen.body)

    @cached_property
    def crop(self) -> Float64[Tensor, "B H R Q"]:
        """log(R_{n_i} + k): the denominator of r in the crop; bit-identical to log Z_r where nothing is hidden."""
        return add(self.cut, self.moved.logsumexp(-1))

    def reading(self, share: Float[Tensor, "B H"]) -> Rows:
        """Return rows that pay this share of their attention to key 0; NaN leaves a head unchanged."""
        late = self.references

        def first(own: Float64[Tensor, "B H *rows m"], body: Float64[Tensor, "B H *rows"]) -> Tensor:
            given = share.double().view(*share.shape, *[1] * (own.ndim - 3))
            frozen = (given / (1 - given)).log() + add(body, own[..., 1:].logsumexp(-1))
            frozen = torch.where(given.isnan() | own[..., 0].isneginf(), own[..., 0], frozen)
            return torch.cat([frozen[..., None], own[..., 1:]], dim=-1)

        return replace(
            self,
            first=first(self.first, self.body),
            moved=first(self.moved, self.cut),
            references=replace(late, first=first(late.first, late.body)),
        )


def call_rows(call: Call, plan: Plan, start: int = 0, placement: Placement | None = None) -> Rows:
    """Compute the sampled rows of a call: one matmul, then their reduction. Errors name the layer.

    start: number of left padding tokens
    placement: how origin keys are moved; None: they are not moved

    Rows do not include a donor; the sum over its visible keys is `Rows.lent`.
    """
    start += call.start
    rows = torch.tensor(plan.rows, device=call.query.device) + start
    try:
        frame = call.visibility.cached(("frame", plan, start), lambda: _frame(call, plan, rows, start))
        logits, moved = call.logits(rows, slice(start, None)), moved_logits(call, placement, plan, start)
        reduced = reduce_rows(logits, frame, plan, call.s_aux, moved, call.unread, call.frozen)
        return reduced if not call.start else replace(reduced, lent=_lent(call, rows))
    except (CheckError, UnsupportedError) as error:
        raise error.at(f"layer {call.layer}") from error


def _lent(call: Call, rows: Int[Tensor, "P"]) -> Float64[Tensor, "B H P"]:
    seen = call.visibility.rows(rows, slice(0, call.start))
    low = int(seen.any(2).flatten().nonzero()[0]) if bool(seen.any()) else call.start
    s = call.logits(rows, slice(low, call.start)).masked_fill_(~seen[..., low:], LOG_ZERO)
    if call.lending is not None:
        s = s.masked_fill(call.lending.share[..., None, None] == 0, LOG_ZERO)
    return s.logsumexp(-1).double() if s.shape[-1] else s.new_full(s.shape[:-1], LOG_ZERO, dtype=torch.float64)


def _frame(call: Call, plan: Plan, rows: Int[Tensor, "P"], start: int) -> Frame:
    visible = call.visibility.rows(rows)[:, 0, :, start:]
    if not bool((visible == visible[:1]).all()):
        raise UnsupportedError(
            "the visible keys differ between prompts of one batch", remedy="use batches of prompts of equal length"
        )
    return Frame.of(visible[0], plan)


def reduce_rows(
    logits: Float[Tensor, "B H P T"],
    visible: Bool[Tensor, "P T"] | Frame,
    plan: Plan,
    s_aux: Float[Tensor, "H"] | None = None,
    moved: Float[Tensor, "B H R Q m"] | None = None,
    unread: Bool[Tensor, "H"] | None = None,
    frozen: Float[Tensor, "B H"] | None = None,
) -> Rows:
    """Reduce the logits of the plan's rows (P = `plan.rows`), given the visible keys or their frame.

    moved: s̃_rj, the logits of references with moved origin keys; None: origin keys are not moved
    unread, frozen: edits of `Call`
    """
    frame = visible if isinstance(visible, Frame) else Frame.of(visible, plan)
    check_finite(logits)
    positions, Q, m = frame.positions, len(plan.queries), plan.origin
    query, late = slice(0, Q), slice(Q, None)
    seen = frame.seen.without_first(unread)
    weights, peak = scaled_weights(logits, frame)
    sums = weights.sum(-1, dtype=torch.float64).log() + peak[..., 0]
    aux = None if s_aux is None else s_aux.detach().double()[:, None]
    first = logits[..., :m].double().masked_fill(~seen.origin, LOG_ZERO)
    if moved is None:
        moved = logits[:, :, late, None, :m].expand(-1, -1, -1, Q, -1)
    references = References(
        frame=frame,
        positions=positions[late],
        logits=logits[:, :, late],
        weights=weights[:, :, late],
        peak=peak[:, :, late],
        whole=sums[..., late],
        seen=seen[late],
        first=first[:, :, late],
        s_aux=aux,
    )
    rows = Rows(
        offsets=frame.offsets,
        seen=seen[query],
        s=gather_offsets(logits[:, :, query], positions[query], frame.offsets, m).double(),
        first=first[:, :, query],
        body=add(sums[..., query], aux),
        moved=moved.double().masked_fill(~seen[query].origin[..., None, :, :], LOG_ZERO),
        references=references,
    )
    return rows if frozen is None else rows.reading(frozen)


def scaled_weights(
    logits: Float[Tensor, "B H P T"], frame: Frame
) -> tuple[Float[Tensor, "B H P T"], Float64[Tensor, "B H P 1"]]:
    """Compute e^{s − peak} of the summed keys, 0 for all others, and the peak.

    Exponents are clamped above underflow, where exp is ten times slower; keys that are not summed are multiplied by 0.
    The clamped terms are negligible in a sum that contains e^0. Sums over fewer keys are checked against UNDERFLOW.
    """
    weights = logits + frame.unsummed.to(logits.dtype)
    peak = weights.amax(-1, keepdim=True).clamp_(min=torch.finfo(weights.dtype).min)
    least = math.ceil(math.log(torch.finfo(weights.dtype).tiny))
    return weights.sub_(peak).clamp_(min=least).exp_().mul_(frame.summed), peak.double()


def gather_offsets(
    logits: Float[Tensor, "B H P T"], positions: Int[Tensor, "P"], offsets: Int[Tensor, "D"], origin: int
) -> Float[Tensor, "B H P D"]:
    """Return s_p(δ) = s_{p, p−δ}; −inf before the start of the body."""
    key = positions[:, None] - offsets
    s = logits.gather(-1, key.clamp(min=0).expand(*logits.shape[:2], -1, -1))
    return s.masked_fill_(key < origin, LOG_ZERO)


def nearest_sums(
    weights: Float[Tensor, "B H P T"], positions: Int[Tensor, "P"], lengths: Int[Tensor, "lengths"]
) -> Float64[Tensor, "B H P lengths"]:
    """Compute Σ_{δ<n} of the weights for increasing lengths n.

    One product with indicators sums the keys between consecutive lengths. These sums are positive, so that their
    cumulative sum, which begins with the nearest keys, loses no digits.
    """
    B, H, P, T = weights.shape
    member = segments(tuple(positions.tolist()), T, tuple(lengths.tolist()), weights.device, weights.dtype)
    sums = torch.matmul(weights.permute(2, 0, 1, 3).reshape(P, B * H, T), member)  # [P, B·H, X]
    return sums.view(P, B, H, -1).permute(1, 2, 0, 3).cumsum(-1, dtype=torch.float64)


@lru_cache(maxsize=6)
def segments(
    positions: tuple[int, ...], keys: int, lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "P T lengths"]:
    """Return indicators of keys whose offset from row p lies between consecutive lengths; cached for all layers."""
    offset = torch.tensor(positions)[:, None] - torch.arange(keys)
    segment = torch.searchsorted(torch.tensor(lengths), offset, right=True)
    member = (segment[..., None] == torch.arange(len(lengths))) & (offset >= 0)[..., None]
    return member.to(device, dtype)


def nearest_offsets(offsets: Sequence[int], length: int) -> list[int]:
    """Return the end of the range of offsets that each sampled offset represents: those nearest to it.

    The ranges follow each other and cover 0 … length − 1; an offset halfway between two belongs to the smaller one.

    >>> nearest_offsets([0, 1, 2, 4], 9)
    [1, 2, 4, 9]
    """
    middles = [(one + other) // 2 + 1 for one, other in itertools.pairwise(offsets)]
    return [*middles, length]


def log_partition(s: Float[Tensor, "*rows T"]) -> Float64[Tensor, "*rows T"]:
    """Compute log Σ_{δ'≤δ} e^{s(δ')}: terms in the dtype of the logits, the cumulative sum in float64.

    A cumulative sum of positive terms keeps its relative precision as long as the first terms do not underflow. If they
    would, the slower sum in log space is used.
    """
    peak = s.amax(-1, keepdim=True)
    total = (s - peak).exp_().cumsum(-1, dtype=torch.float64)
    if float(total[..., 0].min()) < UNDERFLOW:
        return torch.logcumsumexp(s.double(), dim=-1)
    return total.log_().add_(peak)


def add(log_x: Float[Tensor, "*#rows"], log_y: Float[Tensor, "*#rows"] | None) -> Float[Tensor, "*rows"]:
    """Compute log(x + y); log_y = None stands for y = 0."""
    return log_x if log_y is None else torch.logaddexp(log_x, log_y)


def check_finite(logits: Float[Tensor, "B H ..."]) -> None:
    """Raise CheckError with the heads and prompts whose logits are NaN or infinite."""
    if all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(logits)):  # cheap, and NaN propagates
        return
    bad = ~torch.isfinite(logits).flatten(2).all(-1)
    if bool(bad.any()):
        prompts, heads = bad.any(1).nonzero().flatten().tolist(), bad.any(0).nonzero().flatten().tolist()
        raise CheckError(
            "the attention logits are NaN or infinite",
            got=f"heads {heads}, prompts {prompts} of the batch",
            remedy="load the model in a wider dtype (--dtype float32), or check its weights",
        )
