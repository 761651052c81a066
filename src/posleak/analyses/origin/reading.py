"""Sink-reading heads: which heads read position 0, what they write, and how much of it depends on position.

Head h at query i returns o_i = Σ_j a_ij v_j and writes W_h o_i. The contribution of position 0 is a_i0 · W_h v_0: a
direction that depends only on the first token (closure), times a coefficient that varies over i.

    at_0        mean of a_r0 over the reference queries; a sink-reading head has at_0 > ε = 0.3 (threshold of Gu et al.)
    written     a_r0 ‖W_h v_0‖ / ‖W_h o_r‖, mean over the reference queries; above 1 where other keys cancel it
    spread      √ mean_b Var_i(a_i0): standard deviation over the plan's rows i, which are denser early
    positional  share of that variance that all prompts have in common: it depends on position, not on content
    along       share of the variance of W_h o_i over i that lies along W_h v_0

Lengths and angles of W_h v are computed from the Gram matrix of W_h, without vectors of the stream's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from posleak.arrays import Array
from posleak.leakage import MIN_PROMPTS, Estimate, Jackknife, Sampled, combined
from posleak.leakage.dataset import stack_calls
from posleak.leakage.power import products
from posleak.leakage.sampled import Cells
from posleak.probe import Call, Plan

from .fingerprint import Projection
from .states import WithArrays

EPSILON = 0.3


@dataclass(frozen=True)
class LayerReading:
    """One attention call of a batch of prompts: a_i0 at the plan's rows, `written` and `along`, and v_0 (`values`)."""

    attention: Float64[Tensor, "B H P"]
    written: Float64[Tensor, "B H"]
    along: Float64[Tensor, "B H"]
    values: Float64[Tensor, "B K Ev"]


def read(call: Call, out: Float[Tensor, "B H T Ev"], *, plan: Plan, projections: Sequence[Projection]) -> LayerReading:
    """Compute the LayerReading of one attention call from the outputs o_i of its heads.

    projections   the output projection of every call, whose Gram matrices W_h W_hᵀ are used
    """
    rows = torch.tensor(plan.rows, device=call.query.device)
    a = attention_to_origin(call, rows)  # [B, H, P]
    v0 = call.value[:, :, 0].double()
    v = v0.repeat_interleave(call.heads // v0.shape[1], dim=1)  # [B, H, Ev]
    o, gram = out[:, :, rows].double(), projections[call.index].gram.to(out.device)
    gv = torch.einsum("hef,bhf->bhe", gram, v)
    length = (v * gv).sum(-1)  # ‖W_h v_0‖²
    whole = torch.einsum("bhpe,hef,bhpf->bhp", o, gram, o).clamp(min=0)  # ‖W_h o_i‖²
    late = slice(len(plan.queries), None)
    written = (a * (length[..., None] / whole).sqrt())[..., late].mean(-1)
    around = o - o.mean(2, keepdim=True)
    on_line = torch.einsum("bhpe,bhe->bhp", around, gv).square().mean(-1) / length
    spread = torch.einsum("bhpe,hef,bhpf->bhp", around, gram, around).mean(-1)
    return LayerReading(*(x.cpu() for x in (a, written, on_line / spread, v0)))


def attention_to_origin(call: Call, rows: Int[Tensor, "P"]) -> Float64[Tensor, "B H P"]:
    """Return a_i0 of the queries at `rows`; 0 where position 0 is masked."""
    s = call.logits(rows).masked_fill_(~call.visibility.rows(rows).to(call.query.device), -torch.inf)
    log_z = s.logsumexp(-1)
    if call.s_aux is not None:
        log_z = torch.logaddexp(log_z, call.s_aux.to(log_z)[:, None])
    return (s[..., 0].double() - log_z.double()).exp().nan_to_num()


@dataclass(frozen=True)
class HeadReading:
    """One sink-reading head; quantities as defined in this module."""

    layer: int
    call: int
    head: int
    at_0: Estimate
    written: Estimate
    spread: Estimate
    positional: Estimate
    along: Estimate


@dataclass(frozen=True)
class CallReading:
    """One attention call.

    readers      number of its heads that read position 0, with the interval of `reader_counts`
    space        `output`, or `value` where W_O is not known
    projection   name of the module that applies W_O
    """

    call: int
    layer: int
    heads: int
    readers: Estimate
    space: str
    projection: str | None


@dataclass(frozen=True)
class Reading(WithArrays):
    """Which heads read position 0: B prompts, L attention calls, P rows of the plan.

    space       `output` if W_O is known in every call, `value` if in none, else `mixed`
    readers     number of sink-reading heads, out of `of`
    mean        at_0, written, spread, positional and along: means over the sink-reading heads
    at_0        [L, H]  mean a_r0 over the reference queries; NaN where a call has fewer heads
    calls       all calls;  heads: the sink-reading heads, at_0 > epsilon
    attention   [B, L, H, P]  a_i0 at the positions `rows`; neither is part of the JSON
    """

    epsilon: float
    space: str
    readers: Estimate
    of: int
    mean: dict[str, Estimate]
    at_0: Array
    calls: tuple[CallReading, ...]
    heads: tuple[HeadReading, ...]
    attention: Array = field(default_factory=lambda: np.empty(0), repr=False)
    rows: tuple[int, ...] = field(default=(), repr=False)

    @classmethod
    def from_batches(
        cls, batches: Sequence[Sequence[LayerReading]], plan: Plan, projections: Sequence[Projection]
    ) -> Reading:
        """Combine the collected layers of each batch of prompts (`read`)."""
        attention, written, along = (_joined(batches, name) for name in ("attention", "written", "along"))
        late, jackknife = slice(len(plan.queries), None), Jackknife(len(attention))
        at_0 = attention[..., late].mean(-1)  # [B, L, H]
        counts, total = reader_counts(at_0, jackknife)
        readers = at_0.mean(0) > EPSILON
        per_prompt, variation = {"at_0": at_0, "written": written, "along": along}, _variation(attention, jackknife)
        by_head = {name: jackknife.mean(x).estimate for name, x in per_prompt.items()}
        by_head |= {name: x.estimate for name, x in variation.items()}
        mean = {name: jackknife.mean(_mean(x, readers)).estimate for name, x in per_prompt.items()}
        mean |= {name: combined(lambda x: _mean(x, readers), x).estimate for name, x in variation.items()}
        calls = [CallReading(p.call, p.layer, p.heads, counts[c], p.space, p.name) for c, p in enumerate(projections)]
        heads = [
            HeadReading(calls[c].layer, c, h, **{name: estimate[c, h] for name, estimate in by_head.items()})
            for c, h in np.argwhere(readers).tolist()
        ]
        spaces = {call.space for call in calls}
        return cls(
            epsilon=EPSILON, space=spaces.pop() if len(spaces) == 1 else "mixed", readers=total,
            of=sum(call.heads for call in calls), mean=mean, at_0=by_head["at_0"].value, calls=tuple(calls),
            heads=tuple(heads), attention=attention, rows=plan.rows,
        )  # fmt: skip

    @property
    def is_reader(self) -> Bool[np.ndarray, "L H"]:
        """Whether each head is a sink-reading head."""
        return np.asarray(self.at_0 > self.epsilon)


def _joined(batches: Sequence[Sequence[LayerReading]], name: str) -> Float64[np.ndarray, "B L H ..."]:
    """Concatenate one field over batches; calls with fewer heads are padded with NaN."""
    return np.concatenate([stack_calls([getattr(layer, name).numpy() for layer in layers]) for layers in batches])


def reader_counts(at_0: Float64[np.ndarray, "B L H"], jackknife: Jackknife) -> tuple[Estimate, Estimate]:
    """Count sink-reading heads of each call [L], and of all calls.

    low    heads whose interval lies above ε
    high   heads whose interval lies above ε or contains it
    """
    mean = jackknife.mean(at_0).estimate
    missing = np.nan if mean.n < MIN_PROMPTS else 0.0
    low = (mean.low > EPSILON).sum(-1) + missing
    high = (np.isfinite(mean.value) & ~(mean.high <= EPSILON)).sum(-1) + missing
    counts = Estimate((mean.value > EPSILON).sum(-1).astype(float), low, high, mean.n)
    value, lowest, highest = (np.asarray(x.sum()) for x in (counts.value, low, high))
    return counts, Estimate(value, lowest, highest, mean.n)


def _mean(x: Float64[np.ndarray, "*cells L H"], readers: Bool[np.ndarray, "L H"]) -> Cells:
    """Return the mean over sink-reading heads; NaN if there are none."""
    mean: Array = x[..., readers].mean(-1) if readers.any() else np.full(x.shape[:-2], np.nan)
    return mean


def _variation(attention: Float64[np.ndarray, "B L H P"], jackknife: Jackknife) -> dict[str, Sampled]:
    """Return `spread` and `positional` of every head [L, H].

    The common variance is a mean over pairs of different prompts, so that content does not contribute to it.
    """
    centred = attention - attention.mean(-1, keepdims=True)
    variance = jackknife.mean((centred**2).mean(-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        positional = jackknife.inner(products(centred, centred)) / variance
        return {"spread": combined(np.sqrt, variance), "positional": positional}
