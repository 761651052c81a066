"""Leakage, split exactly into mask, drift and sink: the three steps that turn a late query into an early one.

    mask(i, r)     = −[ log(R_{n_i} + k) − log Z_r ]                                  hide the keys that i does not see
    drift(i, δ, r) = [s_i(δ) − s_r(δ)] − [ log(Z'_i + k) − log(R_{n_i} + k) ]         swap the body logits
    sink(i, r)     = −[ log Z_i − log(Z'_i + k) ]                                     swap what is read at position 0
    sum            = log a_i(δ) − log a_r(δ)

averaged over the references r. A learned sink logit is one more constant term inside every log.

A model that scales its queries by absolute position (temperature.py) has a fourth, explicit part. The three steps are
taken on logits at one common temperature t̄, the mean of the references', and what their own temperatures do is

    scaling(i, δ, r) = [ log a_i(δ) − log a_r(δ) ] − [ log ā_i(δ) − log ā_r(δ) ],    ā: attention at s̄_p = s_p t̄ / t_p
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from posleak.probe import Rows
from posleak.probe.rows import add


@dataclass(frozen=True)
class Parts:
    """One layer of a batch of prompts, averaged over references; NaN at pairs (i, δ) that do not exist.

    attention_0      a_i0 of the measured queries
    sink_attention   mean a_r0 over the references
    logit            mean s_r(δ) over the references
    renormalisation  log(Z'_i + k) − log(R_{n_i} + k), so that s_i(δ) = drift + this + logit
    pairs            where i and every r have a visible body key at δ
    remainder        max |mask + drift + sink (+ scaling) − total|, in nats, before averaging over prompts
    scaling          None where queries are not scaled by position
    """

    mask: Float64[Tensor, "B H Q"]
    drift: Float64[Tensor, "B H Q D"]
    sink: Float64[Tensor, "B H Q"]
    mask_without_sink: Float64[Tensor, "B H Q"]
    attention_0: Float64[Tensor, "B H Q"]
    sink_attention: Float64[Tensor, "B H"]
    logit: Float64[Tensor, "B H D"]
    renormalisation: Float64[Tensor, "B H Q"]
    pairs: Bool[Tensor, "Q D"]
    remainder: float
    scaling: Float64[Tensor, "B H Q D"] | None = None


def split(rows: Rows) -> Parts:
    """The parts of every measured query against the mean reference.

    Virtual keys, which an edit puts in the place of hidden ones, undo that much of the mask.
    """
    late, seen = rows.references, rows.sight
    k = late.carried(seen)  # [B, H, R, Q], log
    cut = late.cut_with(k, seen)  # log(R_{n_i} + k)
    swapped = add(add(rows.body[:, :, None], k), None if late.s_aux is None else late.s_aux[..., None])  # log(Z'_i + k)
    log_z_i, log_z_r = rows.log_z, late.log_z  # [B, H, Q], [B, H, R]

    mask = (log_z_r[..., None] - cut).mean(2)
    sink = (swapped - log_z_i[:, :, None]).mean(2)
    if rows.virtual is not None:
        mask, log_z_i = mask - rows.virtual, log_z_i + rows.virtual
    pairs = (rows.offsets < seen.body[:, None]) & (rows.offsets < late.sight.body.min())
    nowhere = ~pairs
    # Logits at pairs that do not exist are −inf: they are taken out before they can meet each other.
    s_i = rows.s.masked_fill(nowhere, 0)
    s_r = _finite(late.at_offsets(rows.offsets)).mean(2, keepdim=True)
    renormalisation = (swapped - cut).mean(2)
    drift = (s_i - s_r) - renormalisation[..., None]
    total = (s_i - log_z_i[..., None]) - (s_r - log_z_r.mean(2)[..., None, None])
    remainder = ((mask[..., None] + drift + sink[..., None]) - total).masked_fill(nowhere, 0).abs().max()
    return Parts(
        mask=mask,
        drift=drift.masked_fill(nowhere, torch.nan),
        sink=sink,
        mask_without_sink=late.hidden_without_sink(seen).mean(2),
        attention_0=(rows.sigma - log_z_i).exp(),
        sink_attention=(late.sigma - log_z_r).exp().mean(-1),
        logit=s_r[:, :, 0].masked_fill(rows.offsets >= late.sight.body.min(), torch.nan),
        renormalisation=renormalisation,
        pairs=pairs,
        remainder=float(remainder),
    )


def split_scaled(rows: Rows, even: Rows) -> Parts:
    """The parts of a layer with scaled queries: `rows` as they are, `even` with all queries at one temperature."""
    parts, plain = split(even), split(rows)
    nowhere = ~parts.pairs
    scaling = log_ratio(rows, nowhere) - log_ratio(even, nowhere)
    sum_of_parts = (parts.mask + parts.sink)[..., None] + parts.drift + scaling
    total = (plain.mask + plain.sink)[..., None] + plain.drift
    remainder = float((sum_of_parts - total).masked_fill(nowhere, 0).abs().max())
    return replace(
        parts,
        attention_0=plain.attention_0,
        sink_attention=plain.sink_attention,
        remainder=max(remainder, parts.remainder, plain.remainder),
        scaling=scaling.masked_fill(nowhere, torch.nan),
    )


def log_ratio(rows: Rows, nowhere: Bool[Tensor, "Q D"]) -> Float64[Tensor, "B H Q D"]:
    """log a_i(δ) − mean over r of log a_r(δ); 0 where there is no such pair."""
    log_z = rows.log_z if rows.virtual is None else rows.log_z + rows.virtual
    late = rows.references
    log_a_r = (_finite(late.at_offsets(rows.offsets)) - late.log_z[..., None]).mean(2, keepdim=True)
    return (rows.s.masked_fill(nowhere, 0) - log_z[..., None] - log_a_r).masked_fill(nowhere, 0)


def _finite(s: Float64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    return s.masked_fill(~torch.isfinite(s), 0)
