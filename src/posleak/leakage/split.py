"""Leakage, split exactly into mask, drift and sink: the three steps that turn a late query into an early one.

    mask(i, r)     = −[ log(R_{n_i} + k) − log Z_r ]                                  hide the keys that i does not see
    drift(i, δ, r) = [s_i(δ) − s_r(δ)] − [ log(Z'_i + k) − log(R_{n_i} + k) ]         swap the body logits
    sink(i, r)     = −[ log Z_i − log(Z'_i + k) ]                                     swap what is read at position 0
    sum            = log a_i(δ) − log a_r(δ)

averaged over the references r. A learned sink logit is one more constant term inside every log.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .rows import NEVER, Rows


@dataclass(frozen=True)
class Parts:
    """One layer of a batch of prompts, averaged over references; NaN at pairs (i, δ) that do not exist.

    mask, sink, mask_without_sink  [B, H, Q]
    drift                          [B, H, Q, D]
    attention_0                    [B, H, Q]   a_i0 of the measured queries
    sink_attention                 [B, H]      mean a_r0 over the references
    pairs                          [Q, D]      where i and every r have a visible body key at δ
    remainder                      max |mask + drift + sink − total|, in nats, before averaging over prompts
    """

    mask: Tensor
    drift: Tensor
    sink: Tensor
    mask_without_sink: Tensor
    attention_0: Tensor
    sink_attention: Tensor
    pairs: Tensor
    remainder: float


def split(rows: Rows) -> Parts:
    """The parts of every measured query against the mean reference."""
    k = carried_over(rows)  # [B, H, R, Q], log
    aux = rows.s_aux
    log_z_i = add(add(rows.body_i, rows.sigma_i), aux)  # [B, H, Q]
    log_z_r = add(add(rows.body_r, rows.sigma_r), aux)  # [B, H, R]
    cut = add(add(rows.cut, k), _wider(aux))  # log(R_{n_i} + k)
    swapped = add(add(rows.body_i[:, :, None], k), _wider(aux))  # log(Z'_i + k)

    mask = (log_z_r[..., None] - cut).mean(2)
    sink = (swapped - log_z_i[:, :, None]).mean(2)
    pairs = (rows.offsets < rows.n_i[:, None]) & (rows.offsets < rows.n_r.min())
    nowhere = ~pairs
    # Logits at pairs that do not exist are −inf: they are taken out before they can meet each other.
    s_i, s_r = rows.s_i.masked_fill(nowhere, 0), _finite(rows.s_r).mean(2, keepdim=True)
    drift = (s_i - s_r) - (swapped - cut).mean(2)[..., None]
    total = (s_i - log_z_i[..., None]) - (s_r - log_z_r.mean(2)[..., None, None])
    remainder = ((mask[..., None] + drift + sink[..., None]) - total).masked_fill(nowhere, 0).abs().max()
    return Parts(
        mask=mask,
        drift=drift.masked_fill(nowhere, torch.nan),
        sink=sink,
        mask_without_sink=without_sink(rows).mean(2),
        attention_0=(rows.sigma_i - log_z_i).exp(),
        sink_attention=(rows.sigma_r - log_z_r).exp().mean(-1),
        pairs=pairs,
        remainder=float(remainder),
    )


ROUNDING = 64 * torch.finfo(torch.float32).eps
"""Relative rounding of a logit, with room (rotations are float32 in any model); e^s is off by |s| times that."""


def carried_over(rows: Rows) -> Tensor:
    """log k [B, H, R, Q], k = max(o + κ, 0), κ = e^{σ_r} − ô: the position-0 term of r at the place where i has it.

    κ = 0 where r does not see key 0, and where it is within rounding of 0: left alone, that noise would be weighed
    against the few keys of an early query and drown them. k = 0 where i does not see key 0. Where i and r see equally
    many keys nothing moves, and k is e^{σ_r} itself.
    """
    sigma, o_hat = rows.sigma_r[..., None], rows.o_hat.masked_fill(~rows.sees_r, NEVER)[..., None]
    top = torch.maximum(torch.maximum(rows.o, sigma), o_hat)
    origin, ordinary = (sigma - top).exp(), (o_hat - top).exp()
    kappa = origin - ordinary
    noise = ROUNDING * sigma.abs().clamp(min=1) * torch.maximum(origin, ordinary)
    kappa = kappa.masked_fill(kappa.abs() <= noise.nan_to_num(), 0)
    log_k = ((rows.o - top).exp() + kappa).clamp(min=0).log() + top
    unmoved = (rows.n_i == rows.n_r[:, None]) & rows.sees_r[:, None]
    return torch.where(unmoved, sigma, log_k).masked_fill(~rows.sees_i, NEVER)


def without_sink(rows: Rows) -> Tensor:
    """−[ log(R_{n_i} + o) − log(R_{n_r} + ô) ] [B, H, R, Q]: the mask's leakage if position 0 were an ordinary key."""
    aux = rows.s_aux
    o_hat = rows.o_hat.masked_fill(~rows.sees_r, NEVER)
    full = add(add(rows.body_r, o_hat), aux)[..., None]
    unmoved = (rows.n_i == rows.n_r[:, None]) & rows.sees_r[:, None]
    o = torch.where(unmoved, o_hat[..., None], rows.o).masked_fill(~rows.sees_i, NEVER)
    return full - add(add(rows.cut, o), _wider(aux))


def add(log_x: Tensor, log_y: Tensor | None) -> Tensor:
    """log(x + y); y may be absent."""
    return log_x if log_y is None else torch.logaddexp(log_x, log_y)


def _wider(aux: Tensor | None) -> Tensor | None:
    return None if aux is None else aux[..., None]


def _finite(s: Tensor) -> Tensor:
    return s.masked_fill(~torch.isfinite(s), 0)
