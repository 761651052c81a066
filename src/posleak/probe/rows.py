"""Sampled rows of logits -> the few numbers per row that everything later is computed from.

    log R_n = log Σ_{δ<n} e^{s(δ)}     a row cut to its nearest n body keys
    log Z   = log( R_{n_p} + e^σ + e^{s_aux} )

Sums in float64, always in log space. `References` are the late rows, which can be cut to any length; `Rows` are those
and the measured queries together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from posleak.errors import CheckError, UnsupportedError

from .call import Call
from .plan import Plan

NEVER = -torch.inf
"""log 0: a key that is not there."""

FEW = 64
"""Lengths that are summed up at once by a product with indicators; more are read off a running sum."""

UNDERFLOW = 1e-24
"""Sums below this are made in log space: a term counts for 1e-38 of its row's peak at least, and a row has up to a
million of them, which is then 1e-8 of the sum."""

ROUNDING = 64 * torch.finfo(torch.float32).eps
"""Relative rounding of a logit, with room (rotations are float32 in any model); e^s is off by |s| times that."""


@dataclass(frozen=True)
class Sight:
    """What rows may see: body = n_p, the number of visible keys j ≥ 1; first: is key 0 visible (to each head)?"""

    body: Int[Tensor, "P"]
    first: Bool[Tensor, "P"] | Bool[Tensor, "H P"]

    def __getitem__(self, rows: slice) -> Sight:
        return Sight(self.body[rows], self.first[..., rows])

    def without_first(self, unread: Bool[Tensor, "H"] | None) -> Sight:
        """The same where the heads with unread true may not see key 0."""
        return self if unread is None else Sight(self.body, self.first & ~unread[:, None])


def sight(visible: Bool[Tensor, "P T"], positions: Int[Tensor, "P"]) -> Sight:
    """Read n_p and the sight of key 0 off visible, and refuse a shape that offsets cannot describe.

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
class Frame:
    """What the plan's rows see under one mask: the same for all layers that share the mask, and made once for them.

    sight     n_p and the sight of key 0, [P]
    summed    body keys that are added up, measured queries over what they see and references over all before them,
              since they are cut later;  unsummed: −inf elsewhere
    """

    plan: Plan
    positions: Int[Tensor, "P"]
    offsets: Int[Tensor, "D"]
    sight: Sight
    summed: Bool[Tensor, "P T"]
    unsummed: Float[Tensor, "P T"]

    @classmethod
    def of(cls, visible: Bool[Tensor, "P T"], plan: Plan) -> Frame:
        """From the keys that the plan's rows may see."""
        positions = torch.tensor(plan.rows, device=visible.device)
        keys, Q = torch.arange(visible.shape[-1], device=visible.device), len(plan.queries)
        summed = torch.cat([visible[:Q], keys <= positions[Q:, None]]) & (keys > 0)
        return cls(
            plan,
            positions,
            torch.tensor(plan.offsets, device=visible.device),
            sight(visible, positions),
            summed,
            torch.zeros(summed.shape, device=summed.device).masked_fill_(~summed, NEVER),
        )


@dataclass(frozen=True)
class References:
    """The late rows r of one layer; R1 = R + 1: the last of them is the anchor, which only gives ô.

    logits    as they are
    weights   e^{s − peak} of body keys, 0 elsewhere
    whole     log of the sum over all body keys up to r
    sight     n_r and the sight of key 0, [R]
    sigma     logit of key 0 (−inf where it is out of sight)
    o_hat     log ô: an ordinary key at offset n_r, mean of e^s over the rows later than r
    """

    positions: Int[Tensor, "R1"]
    logits: Float[Tensor, "B H R1 T"]
    weights: Float[Tensor, "B H R1 T"]
    peak: Float64[Tensor, "B H R1 1"]
    whole: Float64[Tensor, "B H R=R1-1"]
    sight: Sight
    sigma: Float64[Tensor, "B H R=R1-1"]
    o_hat: Float64[Tensor, "B H R=R1-1"]
    s_aux: Float64[Tensor, "H 1"] | None
    _cuts: dict[tuple[int, ...], Float64[Tensor, "B H R Q"]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def body(self) -> Float64[Tensor, "B H R"]:
        """log R_{n_r}"""
        if torch.equal(self.sight.body, self.positions[:-1]):
            return self.whole
        return torch.diagonal(self.cut(self.sight.body), dim1=-2, dim2=-1)

    @property
    def log_z(self) -> Float64[Tensor, "B H R"]:
        """log Z_r"""
        return add(add(self.body, self.sigma), self.s_aux)

    def cut(self, n: Int[Tensor, "Q"]) -> Float64[Tensor, "B H R Q"]:
        """log R_n of every row for lengths n; kept, since several parts ask for the same."""
        if (key := tuple(n.tolist())) not in self._cuts:
            self._cuts[key] = self._cut(n)
        return self._cuts[key]

    def _cut(self, n: Int[Tensor, "Q"]) -> Float64[Tensor, "B H R Q"]:
        late = slice(0, -1)
        lengths, where = n.unique(return_inverse=True)
        if len(lengths) <= FEW:
            sums = nearest_sums(self.weights[:, :, late], self.positions[late], lengths)  # [B, H, R, lengths]
            first = sums[..., int(lengths[0] == 0) :]
            if first.numel() == 0 or float(first.min()) >= UNDERFLOW:
                return (sums.log() + self.peak[:, :, late])[..., where]
        partition = log_partition(by_offset(self.logits[:, :, late], self.positions[late]))
        return take(partition, n.clamp(min=1) - 1).masked_fill(n == 0, NEVER)

    def at_offsets(self, offsets: Int[Tensor, "D"]) -> Float64[Tensor, "B H R D"]:
        """s_r(δ); −inf past the start of the prompt."""
        return gather_offsets(self.logits[:, :, :-1], self.positions[:-1], offsets)

    def ordinary(self, n: Int[Tensor, "Q"]) -> Float64[Tensor, "B H R Q"]:
        """log o = s_r(n): the key of r at the offset where key 0 stands for a query with n body keys."""
        return self.at_offsets(n)

    def carried(self, seen: Sight) -> Float64[Tensor, "B H R Q"]:
        """log k, k = max(o + κ, 0), κ = e^{σ_r} − ô: the position-0 term of r at the place where i has it.

        κ = 0 where r does not see key 0, and where it is within rounding of 0: left alone, that noise would be weighed
        against the few keys of an early query and drown them. k = 0 where i does not see key 0. Where i and r see
        equally many keys nothing moves, and k is e^{σ_r} itself.
        """
        o, sigma, o_hat = self.ordinary(seen.body), self.sigma[..., None], self._visible_o_hat[..., None]
        top = torch.maximum(torch.maximum(o, sigma), o_hat)
        at_0, ordinary = (sigma - top).exp(), (o_hat - top).exp()
        kappa = at_0 - ordinary
        noise = ROUNDING * sigma.abs().clamp(min=1) * torch.maximum(at_0, ordinary)
        kappa = kappa.masked_fill(kappa.abs() <= noise.nan_to_num(), 0)
        log_k = ((o - top).exp() + kappa).clamp(min=0).log() + top
        return torch.where(self._unmoved(seen), sigma, log_k).masked_fill(~seen.first[..., None, :], NEVER)

    def cut_with(self, log_k: Float64[Tensor, "B H R Q"], seen: Sight) -> Float64[Tensor, "B H R Q"]:
        """log(R_{n_i} + k), s_aux included; log Z_r itself, to the bit, where nothing is hidden."""
        cut = add(add(self.cut(seen.body), log_k), _wider(self.s_aux))
        return torch.where(self._unmoved(seen), self.log_z[..., None], cut)

    def hidden(self, seen: Sight) -> Float64[Tensor, "B H R Q"]:
        """mask(i, r) = log Z_r − log(R_{n_i} + k): what hiding the keys that i does not see does to r."""
        return self.log_z[..., None] - self.cut_with(self.carried(seen), seen)

    def hidden_without_sink(self, seen: Sight) -> Float64[Tensor, "B H R Q"]:
        """−[ log(R_{n_i} + o) − log(R_{n_r} + ô) ]: the same if position 0 were an ordinary key."""
        full = add(add(self.body, self._visible_o_hat), self.s_aux)[..., None]
        o = self.ordinary(seen.body).masked_fill(~seen.first[..., None, :], NEVER)
        cut = add(add(self.cut(seen.body), o), _wider(self.s_aux))
        return (full - cut).masked_fill(self._unmoved(seen), 0)

    @property
    def _visible_o_hat(self) -> Float64[Tensor, "B H R"]:
        return self.o_hat.masked_fill(~self.sight.first, NEVER)

    def _unmoved(self, seen: Sight) -> Bool[Tensor, "R Q"] | Bool[Tensor, "H R Q"]:
        """Where i sees as many keys as r does, and key 0 if r does: nothing is hidden."""
        return (seen.body == self.sight.body[:, None]) & (seen.first[..., None, :] == self.sight.first[..., None])


@dataclass(frozen=True)
class Rows:
    """The sampled rows of one layer: measured queries i and the references that they are compared with.

    sight    n_i and the sight of key 0, [Q]
    s        logits by offset (−inf past the start of the prompt)
    sigma    logit of key 0;  body: log Z'_i, s_aux not included
    virtual  how much an edit adds to log Z_i by keys that are not there; None without one
    """

    offsets: Int[Tensor, "D"]
    sight: Sight
    s: Float64[Tensor, "B H Q D"]
    sigma: Float64[Tensor, "B H Q"]
    body: Float64[Tensor, "B H Q"]
    references: References
    virtual: Float[Tensor, "B H Q"] | None = None

    @property
    def log_z(self) -> Float64[Tensor, "B H Q"]:
        """log Z_i, virtual keys not included."""
        return add(add(self.body, self.sigma), self.references.s_aux)

    def reading(self, share: Float[Tensor, "B H"]) -> Rows:
        """The same where every row reads this share of its attention from key 0; NaN leaves a head as it is."""
        late, share = self.references, share.double()[..., None]
        odds = (share / (1 - share)).log()

        def sigma(
            own: Float64[Tensor, "B H P"], body: Float64[Tensor, "B H P"], seen: Sight
        ) -> Float64[Tensor, "B H P"]:
            frozen = odds + add(body, late.s_aux)
            return torch.where(share.isnan(), own, frozen).masked_fill(~seen.first, NEVER)

        references = replace(late, sigma=sigma(late.sigma, late.body, late.sight))
        return replace(self, sigma=sigma(self.sigma, self.body, self.sight), references=references)


def call_rows(call: Call, plan: Plan, start: int = 0) -> Rows:
    """One matmul for a call's sampled rows, then their reduction; `start` skips left padding. Errors name the layer."""
    rows = torch.tensor(plan.rows, device=call.query.device) + start
    try:
        frame = call.visibility.kept(("frame", plan, start), lambda: _frame(call, plan, rows, start))
        virtual = None if call.virtual is None else call.virtual[:, :, rows[: len(plan.queries)]]
        logits = call.logits(rows, slice(start, None))
        return _reduce(logits, frame, call.s_aux, call.unread, call.frozen, virtual)
    except (CheckError, UnsupportedError) as error:
        raise error.at(f"layer {call.index}") from error


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
) -> Rows:
    """The logits of the plan's rows, and the keys that they may see -> Rows. P runs over `plan.rows`."""
    return _reduce(logits, Frame.of(visible, plan), s_aux)


def _reduce(
    logits: Float[Tensor, "B H P T"],
    frame: Frame,
    s_aux: Float[Tensor, "H"] | None,
    unread: Bool[Tensor, "H"] | None = None,
    frozen: Float[Tensor, "B H"] | None = None,
    virtual: Float[Tensor, "B H Q"] | None = None,
) -> Rows:
    """unread, frozen, virtual: what edits do at position 0 and to the denominator (see Call)."""
    check_finite(logits)
    positions, Q = frame.positions, len(frame.plan.queries)
    query, late = slice(0, Q), slice(Q, len(positions) - 1)
    seen = frame.sight.without_first(unread)
    weights, peak = scaled_weights(logits, frame)
    sums = weights.sum(-1, dtype=torch.float64).log() + peak[..., 0]
    sigma = logits[..., 0].double()
    references = References(
        positions=positions[Q:],
        logits=logits[:, :, Q:],
        weights=weights[:, :, Q:],
        peak=peak[:, :, Q:],
        whole=sums[..., late],
        sight=seen[late],
        sigma=sigma[..., late].masked_fill(~seen[late].first, NEVER),
        o_hat=ordinary_key(logits[:, :, Q:], positions[Q:], seen.body[late]),
        s_aux=None if s_aux is None else s_aux.detach().double()[:, None],
    )
    rows = Rows(
        offsets=frame.offsets,
        sight=seen[query],
        s=gather_offsets(logits[:, :, query], positions[query], frame.offsets),
        sigma=sigma[..., query].masked_fill(~seen[query].first, NEVER),
        body=sums[..., query],
        references=references,
        virtual=virtual,
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
    logits: Float[Tensor, "B H P T"], positions: Int[Tensor, "P"], offsets: Int[Tensor, "D"]
) -> Float64[Tensor, "B H P D"]:
    """s_p(δ) = s_{p, p−δ}; −inf where the key would be position 0 or before."""
    key = positions[:, None] - offsets
    s = logits.gather(-1, key.clamp(min=0).expand(*logits.shape[:2], -1, -1))
    return s.double().masked_fill_(key < 1, NEVER)


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


def by_offset(logits: Float[Tensor, "B H P T"], positions: Int[Tensor, "P"]) -> Float[Tensor, "B H P T"]:
    """s_p(δ) for all δ = 0 … T−1, in the dtype of the logits: for sums over every length at once."""
    key = positions[:, None] - torch.arange(logits.shape[-1], device=logits.device)
    s = logits.gather(-1, key.clamp(min=0).expand(*logits.shape[:2], -1, -1))
    return s.masked_fill_(key < 1, NEVER)


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


def ordinary_key(
    logits: Float[Tensor, "B H R1 T"], positions: Int[Tensor, "R1"], n_r: Int[Tensor, "R=R1-1"]
) -> Float64[Tensor, "B H R=R1-1"]:
    """log ô: mean of e^{s_r'(n_r)} over the rows r' > r of the logits, the last the anchor."""
    R = len(n_r)
    candidates = gather_offsets(logits, positions, n_r)  # [B, H, r', r]
    later = torch.ones(R + 1, R, dtype=torch.bool, device=logits.device).tril(-1)
    there = later & torch.isfinite(candidates)
    return candidates.masked_fill(~later, NEVER).logsumexp(-2) - there.sum(-2).double().log()


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
