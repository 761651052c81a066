"""Exact additive decomposition of the leakage into mask, drift and sink: from the late query, through the same query
in a cropped text, to the early query.

    mask(i, r)     = log Z_r − log(R_{n_i} + k)                        r -> r in the crop: fewer keys, same states
    drift(i, δ, r) = [s_i(δ) − log B_i] − [s_r(δ) − log R_{n_i}]       distribution of the weight over body keys
    sink(i, r)     = log(1 + k / R_{n_i}) − log(1 + S_i / B_i)         weight of the origin
    sum            = log a_i(δ) − log a_r(δ)

averaged over the references r. In the crop, the text between i and r is cut out: r sees its nearest n_i body keys, and
those origin keys that i sees, moved to where they are relative to i (k). Every part is invariant to row constants.

A model that scales its queries by absolute position (probe/placement.py) has a fourth, explicit part. The three steps
then use logits at one common temperature t̄, the mean over the references, and the effect of the temperatures is

    scaling(i, δ, r) = [ log a_i(δ) − log a_r(δ) ] − [ log ā_i(δ) − log ā_r(δ) ],    ā: attention at s̄_p = s_p t̄ / t_p
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from posleak.errors import CheckError
from posleak.probe import Call, Placement, Plan, Rows, call_rows
from posleak.probe.branches import BRANCHES, B, BranchLayout
from posleak.probe.rows import add, gather_offsets, visible_keys
from posleak.stopwatch import stage


@dataclass(frozen=True)
class Parts:
    """The parts of one layer for a batch of prompts, means over references; NaN at pairs (i, δ) that do not exist.

    attention_0      a_i0 of the measured queries
    profile          mean attention of the references to each of the first positions
    ordinary         mean attention of the references to one key that is far from them and from the origin
    weight           w(δ): mean attention of the references to the body keys whose offsets are nearest to δ
    logit            mean s_r(δ) over the references
    renormalisation  log B_i − log R_{n_i}, so that s_i(δ) = drift + this + logit
    pairs            whether i and every r have a visible body key at δ
    remainder        max |mask + drift + sink (+ scaling) − total|, in nats, before averaging over prompts
    scaling          None where queries are not scaled by position
    lent             reduction of the total by the keys of a borrowed context; None without one

    If the prompt is read as several branches (probe/branches.py), the parts are those of branch B. Of the others, only
    totals are kept: total_a and lent_a of branch A, total_c of branch C with its lent keys.
    """

    mask: Float64[Tensor, "B H Q"]
    drift: Float64[Tensor, "B H Q D"]
    sink: Float64[Tensor, "B H Q"]
    mask_without_sink: Float64[Tensor, "B H Q"]
    attention_0: Float64[Tensor, "B H Q"]
    profile: Float64[Tensor, "B H first"]
    ordinary: Float64[Tensor, "B H"]
    weight: Float64[Tensor, "B H D"]
    logit: Float64[Tensor, "B H D"]
    renormalisation: Float64[Tensor, "B H Q"]
    pairs: Bool[Tensor, "Q D"]
    remainder: float
    scaling: Float64[Tensor, "B H Q D"] | None = None
    lent: Float64[Tensor, "B H Q"] | None = None
    total_a: Float64[Tensor, "B H Q D"] | None = None
    lent_a: Float64[Tensor, "B H Q"] | None = None
    total_c: Float64[Tensor, "B H Q D"] | None = None


def split(rows: Rows) -> Parts:
    """Return the parts of every measured query, compared with the mean over the references."""
    late, seen = rows.references, rows.seen
    log_z_i, log_z_r = rows.log_z, late.log_z  # [B, H, Q], [B, H, R]
    mask = (log_z_r[..., None] - rows.crop).mean(2)
    sink = (rows.crop - rows.cut).mean(2) - (log_z_i - rows.body)
    missing = ~(pairs := existing_pairs(rows))
    # Logits at pairs that do not exist are −inf: set them to 0, because their differences would be NaN.
    s_i = rows.s.masked_fill(missing, 0)
    s_r = _finite(late.at_offsets(rows.offsets)).mean(2, keepdim=True)
    renormalisation = rows.body - rows.cut.mean(2)
    drift = (s_i - s_r) - renormalisation[..., None]
    total = (s_i - log_z_i[..., None]) - (s_r - log_z_r.mean(2)[..., None, None])
    remainder = ((mask[..., None] + drift + sink[..., None]) - total).masked_fill(missing, 0).abs().max()
    return Parts(
        mask=mask,
        drift=drift.masked_fill(missing, torch.nan),
        sink=sink,
        mask_without_sink=late.without_sink(seen).mean(2),
        attention_0=(rows.first[..., 0] - log_z_i).exp(),
        profile=late.profile,
        ordinary=late.ordinary,
        weight=late.by_offset(rows.offsets),
        logit=s_r[:, :, 0].masked_fill(rows.offsets >= late.seen.body.min(), torch.nan),
        renormalisation=renormalisation,
        pairs=pairs,
        remainder=float(remainder),
        lent=None if rows.lent is None else lent(rows, rows.lent),
    )


def existing_pairs(rows: Rows) -> Bool[Tensor, "Q D"]:
    """Return whether i and every reference have a visible body key at δ."""
    return (rows.offsets < rows.seen.body[:, None]) & (rows.offsets < rows.references.seen.body.min())


def lent(rows: Rows, weight: Float64[Tensor, "B H P"]) -> Float64[Tensor, "B H Q"]:
    """Return the reduction of the total by lent keys: the total without them minus the total with them.

    [log(Z_i + L_i) − log Z_i] − mean over r of [log(Z_r + L_r) − log Z_r],  L: the sum of e^s over the lent keys
    """
    more = torch.nn.functional.softplus(weight - torch.cat([rows.log_z, rows.references.log_z], dim=-1))
    Q = rows.log_z.shape[-1]
    return more[..., :Q] - more[..., Q:].mean(-1, keepdim=True)


def split_scaled(rows: Rows, even: Rows) -> Parts:
    """Return the parts of a layer with scaled queries; rows: as they are, even: with all queries at one temperature."""
    parts, plain = split(even), split(rows)
    missing = ~parts.pairs
    scaling = log_ratio(rows, missing) - log_ratio(even, missing)
    sum_of_parts = (parts.mask + parts.sink)[..., None] + parts.drift + scaling
    total = (plain.mask + plain.sink)[..., None] + plain.drift
    remainder = float((sum_of_parts - total).masked_fill(missing, 0).abs().max())
    return replace(
        parts,
        attention_0=plain.attention_0,
        profile=plain.profile,
        ordinary=plain.ordinary,
        weight=plain.weight,
        remainder=float(np.max([remainder, parts.remainder, plain.remainder])),
        scaling=scaling.masked_fill(missing, torch.nan),
    )


def log_ratio(rows: Rows, missing: Bool[Tensor, "Q D"]) -> Float64[Tensor, "B H Q D"]:
    """Return log a_i(δ) − mean over r of log a_r(δ); 0 at the pairs in `missing`, which do not exist."""
    late = rows.references
    log_a_r = (_finite(late.at_offsets(rows.offsets)) - late.log_z[..., None]).mean(2, keepdim=True)
    return (rows.s.masked_fill(missing, 0) - rows.log_z[..., None] - log_a_r).masked_fill(missing, 0)


def _finite(s: Float64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    return s.masked_fill(~torch.isfinite(s), 0)


@dataclass
class LeakageObserver:
    """Observer that computes the Parts of every attention call of a forward pass.

    start        position at which the prompts begin, after left padding
    placements   effect of positions in each call; without them, origin keys are not moved and queries are not scaled
    layers       the Parts of the calls so far
    """

    plan: Plan
    start: int = 0
    placements: Sequence[Placement] = ()
    layers: list[Parts] = field(default_factory=list)

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        place = self.placements[call.index] if self.placements else None
        if call.layout is not None:
            self.layers.append(self._branched(call, call.layout, place))
            return
        t = None if place is None else place.temperature
        with stage("rows"):
            rows = call_rows(call, self.plan, self.start, place)
            even = None if t is None else call_rows(self._even(call, t), self.plan, self.start, place)
        with stage("split"):
            self.layers.append(split(rows) if even is None else split_scaled(rows, even))

    def _branched(self, call: Call, layout: BranchLayout, place: Placement | None) -> Parts:
        with stage("rows"):
            a, b, c = (
                call_rows(layout.view(call, branch), self.plan, self.start, place if branch == B else None)
                for branch in BRANCHES
            )
        with stage("split"):
            parts, (lent_a, lent_c) = split(b), (lent(rows, rows.lent) for rows in (a, c) if rows.lent is not None)
            total_a, total_c = (log_ratio(rows, ~parts.pairs) for rows in (a, c))
            total_c = total_c - lent_c[..., None]
            missing = ~(parts.pairs & existing_pairs(a) & existing_pairs(c))
            if not torch.equal(missing, ~parts.pairs):
                raise CheckError(
                    "the branches of a prompt do not have the same pairs of query and offset",
                    where=f"layer {call.layer}", remedy="please report it: results for this model would be wrong",
                )  # fmt: skip
            total_a, total_c = (x.masked_fill(missing, torch.nan) for x in (total_a, total_c))
            return replace(parts, total_a=total_a, lent_a=lent_a, total_c=total_c)

    def _even(self, call: Call, t: Float64[Tensor, "P"]) -> Call:
        """Return the call with every query at the references' mean temperature."""
        late = slice(len(self.plan.queries), None)
        rows = torch.tensor(self.plan.rows, device=call.query.device) + self.start
        query = call.query.to(torch.promote_types(call.query.dtype, torch.float32), copy=True)
        query[:, :, rows] *= (t[late].mean() / t)[:, None].to(query)
        return replace(call, query=query)

    def collect(self) -> list[Parts]:
        """Return the layers observed since the last call of this method."""
        layers, self.layers = self.layers, []
        return layers


def log_attention_rows(call: Call, out: Float[Tensor, "B H T Ev"], plan: Plan) -> Float64[Tensor, "B H Q D"]:
    """Return log a_i(δ) of the measured queries of a call; NaN at pairs that do not exist."""
    rows = call_rows(call, plan)
    missing = rows.offsets >= rows.seen.body[:, None]
    return (rows.s - rows.log_z[..., None]).masked_fill(missing, torch.nan)


def sampled_total(call: Call, plan: Plan) -> Float64[Tensor, "B H Q D"]:
    """Return the total of the measured queries of a call, differentiably; NaN at pairs that do not exist.

    Of a call with more keys than queries, only the last keys count, which are those of the prompt.
    """
    rows, offsets = (torch.tensor(x, device=call.query.device) for x in (plan.rows, plan.offsets))
    Q, keys = len(plan.queries), slice(call.key.shape[2] - call.query.shape[2], None)
    logits, seen = call.logits(rows, keys).double(), call.visibility.rows(rows, keys)[0, 0]
    aux = None if call.s_aux is None else call.s_aux.detach().double()[:, None]
    log_z = add(logits.masked_fill(~seen, -torch.inf).logsumexp(-1), aux)
    body = visible_keys(seen, rows, plan.origin).body
    missing = (offsets >= body[:Q, None]) | (offsets >= body[Q:].min())
    log_a = gather_offsets(logits, rows, offsets, plan.origin) - log_z[..., None]
    early, late = log_a[:, :, :Q].masked_fill(missing, 0), _finite(log_a[:, :, Q:]).mean(2, keepdim=True)
    return (early - late).masked_fill(missing, torch.nan)
