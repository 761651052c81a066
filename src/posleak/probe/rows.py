"""Sampled rows of logits -> the few numbers per row that everything later is computed from.

    log R_n = log( Σ_{δ<n} e^{s(δ)} + e^{s_aux} )    a row cut to its nearest n body keys
    log S   = log Σ over visible origin keys of e^s
    log Z   = log( R_{n_p} + S )
    log k   = log Σ over origin keys that i sees of e^{s̃_rj}, the logit of r with the key moved to where i has it

Sums in float64, always in log space. `References` are the late rows, which can be cut to any length; `Rows` are those
and the measured queries together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from posleak.errors import CheckError, UnsupportedError

from .call import Call
from .placement import Placement, moved_logits
from .plan import Plan

LOG_ZERO = -torch.inf
"""log 0: a key that is not there."""

PROFILE_POSITIONS = 16
"""Of so many first positions, and of as many after the origin, it is kept how much the references attend to them."""

MATMUL_LENGTHS = 96
"""Lengths that are summed up at once by a product with indicators; more are read off a running sum."""

UNDERFLOW = 1e-24
"""Sums below this are made in log space: a term counts for 1e-38 of its row's peak at least, and a row has up to a
million of them, which is then 1e-8 of the sum."""


@dataclass(frozen=True)
class VisibleKeys:
    """What rows may see: body = n_p, the number of visible body keys; origin: which of its keys (to each head)."""

    body: Int[Tensor, "P"]
    origin: Bool[Tensor, "P m"] | Bool[Tensor, "H P m"]

    def __getitem__(self, rows: slice) -> VisibleKeys:
        return VisibleKeys(self.body[rows], self.origin[..., rows, :])

    def without_first(self, unread: Bool[Tensor, "H"] | None) -> VisibleKeys:
        """The same where the heads with unread true may not see key 0."""
        if unread is None:
            return self
        origin = self.origin.expand(len(unread), *self.origin.shape).clone()
        origin[unread, :, 0] = False
        return VisibleKeys(self.body, origin)

    @property
    def count(self) -> Int[Tensor, "P"] | Int[Tensor, "H P"]:
        """m_p: how many origin keys are seen."""
        return self.origin.sum(-1)


def visible_keys(visible: Bool[Tensor, "P T"], positions: Int[Tensor, "P"], origin: int) -> VisibleKeys:
    """Read n_p and the sight of the origin off visible, and refuse a shape that offsets cannot describe.

    The visible body keys of a row must be its nearest ones, without a gap: true for causal attention, windows, chunks.
    """
    body = visible[:, origin:].sum(-1)
    keys = torch.arange(visible.shape[1], device=visible.device)
    nearest = (keys <= positions[:, None]) & (keys > (positions - body)[:, None])
    if not torch.equal(nearest[:, origin:], visible[:, origin:]):
        row = int(positions[(nearest[:, origin:] != visible[:, origin:]).any(-1)][0])
        future = bool(visible[positions == row][:, row + 1 :].any())
        raise UnsupportedError(
            "a query sees keys after itself" if future else "a query does not see its nearest keys without a gap",
            where=f"query {row}",
            expected="causal attention, whole, windowed or chunked",
            remedy="leakage at equal offsets is not defined for this attention pattern",
        )
    return VisibleKeys(body, visible[:, :origin])


@dataclass(frozen=True)
class Frame:
    """What the plan's rows see under one mask: the same for all layers that share the mask, and made once for them.

    sight     n_p and the sight of the origin, [P]
    visible   keys that the references see
    summed    body keys that are added up, measured queries over what they see and references over all before them,
              since they are cut later;  unsummed: −inf elsewhere
    lengths   numbers of body keys that references will be cut to, increasing
    """

    plan: Plan
    positions: Int[Tensor, "P"]
    offsets: Int[Tensor, "D"]
    seen: VisibleKeys
    visible: Bool[Tensor, "R T"]
    summed: Bool[Tensor, "P T"]
    unsummed: Float[Tensor, "P T"]
    lengths: Int[Tensor, "n"]

    @classmethod
    def of(cls, visible: Bool[Tensor, "P T"], plan: Plan) -> Frame:
        """From the keys that the plan's rows may see."""
        positions = torch.tensor(plan.rows, device=visible.device)
        keys, Q = torch.arange(visible.shape[-1], device=visible.device), len(plan.queries)
        summed = torch.cat([visible[:Q], keys <= positions[Q:, None]]) & (keys >= plan.origin)
        seen = visible_keys(visible, positions, plan.origin)
        n_i, n_r, m_i = seen.body[:Q], seen.body[Q:], seen.count[:Q]
        windowed = n_r[n_r != positions[Q:] - plan.origin + 1]
        lengths = torch.cat([n_i, torch.minimum(n_i + m_i, n_r[:, None]).flatten(), windowed]).unique()
        return cls(
            plan,
            positions,
            torch.tensor(plan.offsets, device=visible.device),
            seen,
            visible[Q:],
            summed,
            torch.zeros(summed.shape, device=summed.device).masked_fill_(~summed, LOG_ZERO),
            lengths,
        )


@dataclass(frozen=True)
class References:
    """The late rows r of one layer.

    logits    as they are
    weights   e^{s − peak} of body keys, 0 elsewhere
    whole     log of the sum over all body keys up to r
    sight     n_r and the sight of the origin, [R]
    first     logits of the origin's keys (−inf where they are out of sight)
    visible   keys that are seen
    lengths   numbers of body keys that rows will be cut to, increasing
    """

    positions: Int[Tensor, "R"]
    logits: Float[Tensor, "B H R T"]
    weights: Float[Tensor, "B H R T"]
    peak: Float64[Tensor, "B H R 1"]
    whole: Float64[Tensor, "B H R"]
    seen: VisibleKeys
    first: Float64[Tensor, "B H R m"]
    visible: Bool[Tensor, "R T"]
    lengths: Int[Tensor, "n"]
    s_aux: Float64[Tensor, "H 1"] | None

    @property
    def origin(self) -> int:
        """m"""
        return self.first.shape[-1]

    @cached_property
    def keys(self) -> Float64[Tensor, "B H R"]:
        """log R_{n_r} without s_aux: what its visible body keys weigh."""
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
        """log R_n of every row for lengths n; R_{n_r} itself, to the bit, where n = n_r."""
        cut = add(self._sums(n), _wider(self.s_aux))
        return torch.where(n == self.seen.body[:, None], self.body[..., None], cut)

    def _sums(self, n: Int[Tensor, "n"]) -> Float64[Tensor, "B H R n"]:
        """The same without s_aux; the lengths that are known beforehand are summed up at once."""
        at = torch.searchsorted(self.lengths, n).clamp(max=len(self.lengths) - 1)
        return self._known[..., at] if torch.equal(self.lengths[at], n) else self._sum(n)

    @cached_property
    def _known(self) -> Float64[Tensor, "B H R n"]:
        return self._sum(self.lengths)

    def _sum(self, n: Int[Tensor, "n"]) -> Float64[Tensor, "B H R n"]:
        lengths, where = n.unique(return_inverse=True)
        if len(lengths) <= MATMUL_LENGTHS:
            sums = nearest_sums(self.weights, self.positions, lengths)  # [B, H, R, lengths]
            if float(sums[..., 0].min()) >= UNDERFLOW:
                return (sums.log() + self.peak)[..., where]
        partition = log_partition(by_offset(self.logits, self.positions, self.origin))
        return take(partition, n - 1)

    def at_offsets(self, offsets: Int[Tensor, "D"]) -> Float64[Tensor, "B H R D"]:
        """s_r(δ); −inf past the start of the body."""
        return gather_offsets(self.logits, self.positions, offsets, self.origin)

    def without_sink(self, seen: VisibleKeys) -> Float64[Tensor, "B H R Q"]:
        """The mask's part if the origin's keys were ordinary body keys: log of what r sees, with as many more keys of
        the mean weight, over its nearest n_i + m_i body keys."""
        n_r, ordinary = self.seen.body, self.seen.count.double() / self.seen.body
        full = add(self.keys + ordinary.log1p(), self.s_aux)[..., None]
        n = torch.minimum((seen.body + seen.count)[..., None, :], n_r[:, None])  # [R, Q] or [H, R, Q]
        every = n.unique()
        sums = self._sums(every)
        index = torch.searchsorted(every, n).expand(*sums.shape[:3], -1)
        part = add(sums.gather(-1, index), _wider(self.s_aux))
        alike = (n == n_r[:, None]) & (self.seen.count == 0)[..., None]
        return (full - part).masked_fill(alike, 0)

    @cached_property
    def profile(self) -> Float64[Tensor, "B H first"]:
        """Mean attention of the references to each of the first positions."""
        shown = min(self.logits.shape[-1], PROFILE_POSITIONS + self.origin)
        later = slice(self.origin, shown)
        s = torch.cat([self.first, self.logits[..., later].double().masked_fill(~self.visible[:, later], LOG_ZERO)], -1)
        return (s - self.log_z[..., None]).exp().mean(2)

    @cached_property
    def ordinary(self) -> Float64[Tensor, "B H"]:
        """Mean attention of the references to one key of the prompt's second quarter; NaN if they see none of it."""
        N = self.logits.shape[-1]
        far = slice(max(N // 4, self.origin), N // 2)
        seen = self.visible[:, far]
        sums = (self.weights[..., far] * seen).sum(-1, dtype=torch.float64).log() + self.peak[..., 0] - self.log_z
        return (sums.exp() / seen.sum(-1)).nanmean(-1)


@dataclass(frozen=True)
class Rows:
    """The sampled rows of one layer: measured queries i and the references that they are compared with.

    sight    n_i and the sight of the origin, [Q]
    s        logits by offset (−inf past the start of the body)
    first    logits of the origin's keys;  body: log B_i, s_aux included
    moved    s̃_rj, the logits of the references with the origin's keys moved to where i has them (−inf: unseen by i)
    lent     log of what keys of a borrowed context weigh in the queries' rows, then the references'; None without one
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
        """log Z_i, lent keys not included."""
        return add(self.body, self.first.logsumexp(-1))

    @cached_property
    def cut(self) -> Float64[Tensor, "B H R Q"]:
        """log R_{n_i}"""
        return self.references.cut(self.seen.body)

    @cached_property
    def crop(self) -> Float64[Tensor, "B H R Q"]:
        """log(R_{n_i} + k): the denominator of r in the crop; Z_r itself, to the bit, where nothing is hidden."""
        return add(self.cut, self.moved.logsumexp(-1))

    def reading(self, share: Float[Tensor, "B H"]) -> Rows:
        """The same where every row reads this share of its attention from key 0; NaN leaves a head as it is."""
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
    """One matmul for a call's sampled rows, then their reduction; `start` skips left padding. Errors name the layer.

    Without a placement, keys of the origin stay where they are. A borrowed context is left out of the rows, and what
    its keys weigh is added as `lent`.
    """
    start += call.start
    rows = torch.tensor(plan.rows, device=call.query.device) + start
    try:
        frame = call.visibility.cached(("frame", plan, start), lambda: _frame(call, plan, rows, start))
        logits, moved = call.logits(rows, slice(start, None)), moved_logits(call, placement, plan, start)
        found = _reduce(logits, frame, call.s_aux, moved, call.unread, call.frozen)
        return found if not call.start else replace(found, lent=_lent(call, rows))
    except (CheckError, UnsupportedError) as error:
        raise error.at(f"layer {call.layer}") from error


def _lent(call: Call, rows: Int[Tensor, "P"]) -> Float64[Tensor, "B H P"]:
    """log Σ of e^s over the visible keys before the prompt."""
    seen = call.visibility.rows(rows, slice(0, call.start))
    low = int(seen.any(2).flatten().nonzero()[0]) if bool(seen.any()) else call.start
    s = call.logits(rows, slice(low, call.start)).masked_fill_(~seen[..., low:], LOG_ZERO)
    return s.logsumexp(-1).double() if s.shape[-1] else s.new_full(s.shape[:-1], LOG_ZERO, dtype=torch.float64)


def _frame(call: Call, plan: Plan, rows: Int[Tensor, "P"], start: int) -> Frame:
    visible = call.visibility.rows(rows)[:, 0, :, start:]
    if not bool((visible == visible[:1]).all()):
        raise UnsupportedError("prompts of one batch see different keys", remedy="batch prompts of equal length")
    return Frame.of(visible[0], plan)


def reduce_rows(
    logits: Float[Tensor, "B H P T"],
    visible: Bool[Tensor, "P T"],
    plan: Plan,
    s_aux: Float[Tensor, "H"] | None = None,
    moved: Float[Tensor, "B H R Q m"] | None = None,
) -> Rows:
    """The logits of the plan's rows, and the keys that they may see -> Rows. P runs over `plan.rows`.

    moved: s̃_rj, the logits of the references with the origin's keys at the measured queries' offsets; None: they stay.
    """
    return _reduce(logits, Frame.of(visible, plan), s_aux, moved)


def _reduce(
    logits: Float[Tensor, "B H P T"],
    frame: Frame,
    s_aux: Float[Tensor, "H"] | None,
    moved: Float[Tensor, "B H R Q m"] | None = None,
    unread: Bool[Tensor, "H"] | None = None,
    frozen: Float[Tensor, "B H"] | None = None,
) -> Rows:
    """unread, frozen: what edits do at position 0 (see Call)."""
    check_finite(logits)
    positions, Q, m = frame.positions, len(frame.plan.queries), frame.plan.origin
    query, late = slice(0, Q), slice(Q, None)
    seen = frame.seen.without_first(unread)
    weights, peak = scaled_weights(logits, frame)
    sums = weights.sum(-1, dtype=torch.float64).log() + peak[..., 0]
    aux = None if s_aux is None else s_aux.detach().double()[:, None]
    first = logits[..., :m].double().masked_fill(~seen.origin, LOG_ZERO)
    if moved is None:
        moved = logits[:, :, late, None, :m].expand(-1, -1, -1, Q, -1)
    references = References(
        positions=positions[late],
        logits=logits[:, :, late],
        weights=weights[:, :, late],
        peak=peak[:, :, late],
        whole=sums[..., late],
        seen=seen[late],
        first=first[:, :, late],
        visible=frame.visible,
        lengths=frame.lengths,
        s_aux=aux,
    )
    rows = Rows(
        offsets=frame.offsets,
        seen=seen[query],
        s=gather_offsets(logits[:, :, query], positions[query], frame.offsets, m),
        first=first[:, :, query],
        body=add(sums[..., query], aux),
        moved=moved.double().masked_fill(~seen[query].origin[..., None, :, :], LOG_ZERO),
        references=references,
    )
    return rows if frozen is None else rows.reading(frozen)


def scaled_weights(
    logits: Float[Tensor, "B H P T"], frame: Frame
) -> tuple[Float[Tensor, "B H P T"], Float64[Tensor, "B H P 1"]]:
    """e^{s − peak} of the keys that are summed, 0 elsewhere, and peak.

    Exponents are kept above underflow, where exp is ten times slower, and what must be 0 is multiplied by 0. Terms so
    small do not matter in a sum that has e^0 in it; sums over fewer keys are checked against UNDERFLOW.
    """
    weights = logits + frame.unsummed.to(logits.dtype)
    peak = weights.amax(-1, keepdim=True).clamp_(min=torch.finfo(weights.dtype).min)
    least = math.ceil(math.log(torch.finfo(weights.dtype).tiny))
    return weights.sub_(peak).clamp_(min=least).exp_().mul_(frame.summed), peak.double()


def gather_offsets(
    logits: Float[Tensor, "B H P T"], positions: Int[Tensor, "P"], offsets: Int[Tensor, "D"], origin: int
) -> Float64[Tensor, "B H P D"]:
    """s_p(δ) = s_{p, p−δ}; −inf where the key would be one of the origin's, or before."""
    key = positions[:, None] - offsets
    s = logits.gather(-1, key.clamp(min=0).expand(*logits.shape[:2], -1, -1))
    return s.double().masked_fill_(key < origin, LOG_ZERO)


def nearest_sums(
    weights: Float[Tensor, "B H P T"], positions: Int[Tensor, "P"], lengths: Int[Tensor, "lengths"]
) -> Float64[Tensor, "B H P lengths"]:
    """Σ_{δ<n} of the weights for increasing lengths n.

    Keys fall into the segments between two lengths, which one product with their indicators adds up; the segments are
    positive, so that adding them up from the nearest on keeps every digit.
    """
    B, H, P, T = weights.shape
    member = segments(tuple(positions.tolist()), T, tuple(lengths.tolist()), weights.device, weights.dtype)
    sums = torch.matmul(weights.permute(2, 0, 1, 3).reshape(P, B * H, T), member)  # [P, B·H, X]
    return sums.view(P, B, H, -1).permute(1, 2, 0, 3).cumsum(-1, dtype=torch.float64)


@lru_cache(maxsize=4)
def segments(
    positions: tuple[int, ...], keys: int, lengths: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "P T lengths"]:
    """Indicators: key j of row p lies at an offset from one length up to the next. Kept: all layers ask."""
    offset = torch.tensor(positions)[:, None] - torch.arange(keys)
    segment = torch.searchsorted(torch.tensor(lengths), offset, right=True)
    member = (segment[..., None] == torch.arange(len(lengths))) & (offset >= 0)[..., None]
    return member.to(device, dtype)


def by_offset(logits: Float[Tensor, "B H P T"], positions: Int[Tensor, "P"], origin: int) -> Float[Tensor, "B H P T"]:
    """s_p(δ) for all δ = 0 … T−1, in the dtype of the logits: for sums over every length at once."""
    key = positions[:, None] - torch.arange(logits.shape[-1], device=logits.device)
    s = logits.gather(-1, key.clamp(min=0).expand(*logits.shape[:2], -1, -1))
    return s.masked_fill_(key < origin, LOG_ZERO)


def log_partition(s: Float[Tensor, "*rows T"]) -> Float64[Tensor, "*rows T"]:
    """log Σ_{δ'≤δ} e^{s(δ')}: terms in the dtype of the logits, the running sum in float64.

    A running sum of positive terms keeps its relative precision however small its first terms are, as long as they do
    not underflow; where a row spans so many nats that they would, the slower sum in log space takes over.
    """
    peak = s.amax(-1, keepdim=True)
    total = (s - peak).exp_().cumsum(-1, dtype=torch.float64)
    if float(total[..., 0].min()) < UNDERFLOW:
        return torch.logcumsumexp(s.double(), dim=-1)
    return total.log_().add_(peak)


def take(s: Float[Tensor, "*rows T"], index: Int[Tensor, "Q"]) -> Float64[Tensor, "*rows Q"]:
    """s at an index along the last axis."""
    return s[..., index].double()


def add(log_x: Float[Tensor, "*#rows"], log_y: Float[Tensor, "*#rows"] | None) -> Float[Tensor, "*rows"]:
    """log(x + y); y may be absent."""
    return log_x if log_y is None else torch.logaddexp(log_x, log_y)


def _wider(aux: Float[Tensor, "*rows"] | None) -> Float[Tensor, "*rows 1"] | None:
    return None if aux is None else aux[..., None]


def check_finite(logits: Float[Tensor, "B H ..."]) -> None:
    """Refuse logits that are no numbers, naming the heads."""
    if all(
        bool(torch.isfinite(extreme)) for extreme in torch.aminmax(logits)
    ):  # NaN comes through, and is cheap to see
        return
    bad = ~torch.isfinite(logits).flatten(2).all(-1)
    if bool(bad.any()):
        prompts, heads = bad.any(1).nonzero().flatten().tolist(), bad.any(0).nonzero().flatten().tolist()
        raise CheckError(
            "the attention logits are NaN or infinite",
            got=f"heads {heads}, prompts {prompts} of the batch",
            remedy="load the model in a wider dtype (--dtype float32), or check its weights",
        )
