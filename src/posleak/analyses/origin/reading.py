"""Sink-reading heads: who reads position 0, what it writes with it, and how much of that says position.

Head h at query i returns o_i = Σ_j a_ij v_j and writes W_h o_i. Its part from position 0 is a_i0 · W_h v_0: a direction
that the first token fixes (closure), times a coefficient that varies over i.

    reads       mean of a_r0 over the reference queries > ε = 0.3 (Gu et al.'s threshold)
    written     a_r0 ‖W_h v_0‖ / ‖W_h o_r‖, mean over the reference queries; above 1 where the rest cancels it
    spread      √ mean_b Var_i(a_i0): standard deviation over the plan's rows i (they are denser early)
    positional  the share of that variance that is the same in every prompt: what of it says position, not content
    along       share of the variance of W_h o_i over i that lies on the line of W_h v_0

Lengths and angles of W_h v come from the Gram matrix of W_h, so that nothing of the stream's width is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from posleak.arrays import Array
from posleak.leakage import MIN_PROMPTS, Estimate, Jackknife, combined
from posleak.leakage.power import products
from posleak.leakage.sampled import Cells
from posleak.probe import Call, Plan

from .projection import Projection

EPSILON = 0.3


@dataclass(frozen=True)
class LayerReading:
    """One attention call of a batch: attention to position 0 of the plan's rows; values: v_0."""

    attention: Float64[Tensor, "B H P"]
    written: Float64[Tensor, "B H"]
    along: Float64[Tensor, "B H"]
    values: Float64[Tensor, "B K Ev"]


@dataclass
class ReadingObserver:
    """Looks at the plan's rows of every attention call; one Projection for each call."""

    plan: Plan
    projections: Sequence[Projection]
    layers: list[LayerReading] = field(default_factory=list)

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        self.layers.append(read(call, out, self.plan, self.projections[call.index].gram))

    def collect(self) -> list[LayerReading]:
        """The layers seen since the last call of this method."""
        layers, self.layers = self.layers, []
        return layers


def read(call: Call, out: Float[Tensor, "B H T Ev"], plan: Plan, gram: Float64[Tensor, "H Ev Ev"]) -> LayerReading:
    """gram of what the heads write; out: what they return."""
    rows = torch.tensor(plan.rows, device=call.query.device)
    a = attention_to_origin(call, rows)  # [B, H, P]
    v0 = call.value[:, :, 0].double()
    v = v0.repeat_interleave(call.heads // v0.shape[1], dim=1)  # [B, H, Ev]
    o, gram = out[:, :, rows].double(), gram.to(out.device)
    gv = torch.einsum("hef,bhf->bhe", gram, v)
    length = (v * gv).sum(-1)  # ‖W_h v_0‖²
    whole = torch.einsum("bhpe,hef,bhpf->bhp", o, gram, o).clamp(min=0)  # ‖W_h o_i‖²
    late = slice(len(plan.queries), len(plan.queries) + len(plan.references))
    written = (a * (length[..., None] / whole).sqrt())[..., late].mean(-1)
    around = o - o.mean(2, keepdim=True)
    on_line = torch.einsum("bhpe,bhe->bhp", around, gv).square().mean(-1) / length
    spread = torch.einsum("bhpe,hef,bhpf->bhp", around, gram, around).mean(-1)
    return LayerReading(*(x.cpu() for x in (a, written, on_line / spread, v0)))


def attention_to_origin(call: Call, rows: Int[Tensor, "P"]) -> Float64[Tensor, "B H P"]:
    """a_i0 of the queries at `rows`, 0 where position 0 is out of sight."""
    s = call.logits(rows).masked_fill_(~call.visibility.rows(rows).to(call.query.device), -torch.inf)
    log_z = s.logsumexp(-1)
    if call.s_aux is not None:
        log_z = torch.logaddexp(log_z, call.s_aux.to(log_z)[:, None])
    return (s[..., 0].double() - log_z.double()).exp().nan_to_num()


@dataclass(frozen=True)
class Reading:
    """All heads, [L, H] for L attention calls (NaN where a call has fewer heads); B prompts, P rows of the plan.

    attention   a_i0 at the plan's rows;  rows: their positions
    at_0        mean a_r0 over the reference queries;  written, spread, positional, along: see the module
    readers     at_0 > epsilon
    counts      [L]  readers of each call, with those that certainly are and those that may be;  total: of all calls
    mean        at_0, written, spread, positional and along, each the mean over the readers
    heads       [L]  heads of each call;  layers [L]: the layer it is part of;  spaces [L]: output | value
    """

    rows: tuple[int, ...]
    epsilon: float
    attention: Float64[np.ndarray, "B L H P"]
    at_0: Estimate
    written: Estimate
    spread: Estimate
    positional: Estimate
    along: Estimate
    readers: Bool[np.ndarray, "L H"]
    counts: Estimate
    total: Estimate
    mean: dict[str, Estimate]
    heads: tuple[int, ...]
    layers: tuple[int, ...]
    spaces: tuple[str, ...]
    modules: tuple[str | None, ...]

    @classmethod
    def of(
        cls, batches: Sequence[Sequence[LayerReading]], plan: Plan, found: Sequence[Projection], jackknife: Jackknife
    ) -> Reading:
        """batches: what a ReadingObserver collected from each batch of prompts."""
        attention, written, along = (_joined(batches, name) for name in ("attention", "written", "along"))
        late = slice(len(plan.queries), len(plan.queries) + len(plan.references))
        at_0 = attention[..., late].mean(-1)  # [B, L, H]
        counts, total = reader_counts(at_0, jackknife)
        readers = at_0.mean(0) > EPSILON
        means = {"at_0": at_0, "written": written, "along": along}
        spread, positional, varies = _variation(attention, jackknife, readers)
        return cls(
            rows=plan.rows, epsilon=EPSILON, attention=attention, at_0=jackknife.mean(at_0).estimate,
            written=jackknife.mean(written).estimate, spread=spread, positional=positional,
            along=jackknife.mean(along).estimate, readers=readers, counts=counts, total=total,
            mean={name: jackknife.mean(_mean(x, readers)).estimate for name, x in means.items()} | varies,
            heads=tuple(p.heads for p in found), layers=tuple(p.layer for p in found),
            spaces=tuple(p.space for p in found), modules=tuple(p.name for p in found),
        )  # fmt: skip

    @property
    def space(self) -> str:
        """`output` if W_O is known everywhere, `value` if nowhere, else `mixed`."""
        return self.spaces[0] if len(set(self.spaces)) == 1 else "mixed"

    def as_dict(self) -> dict[str, Any]:
        """Heads as records, those that read position 0 only."""
        names = ("at_0", "written", "spread", "positional", "along")
        records = [
            {"layer": self.layers[c], "call": c, "head": h, **{n: getattr(self, n)[c, h] for n in names}}
            for c, h in np.argwhere(self.readers).tolist()
        ]
        calls = [
            {"call": c, "layer": self.layers[c], "heads": self.heads[c], "readers": self.counts[c],
             "space": self.spaces[c], "projection": self.modules[c]}
            for c in range(len(self.heads))
        ]  # fmt: skip
        return {
            "epsilon": self.epsilon, "space": self.space, "readers": self.total, "of": sum(self.heads),
            "mean": self.mean, "at_0": self.at_0.value, "calls": calls, "heads": records,
        }  # fmt: skip


def _joined(batches: Sequence[Sequence[LayerReading]], name: str) -> Float64[np.ndarray, "B L H ..."]:
    """Over all batches; calls with fewer heads are filled up with NaN."""
    heads = max(layer.attention.shape[1] for layer in batches[0])

    def padded(layer: LayerReading) -> Float64[np.ndarray, "b H ..."]:
        x = getattr(layer, name).numpy()
        return np.pad(x, [(0, 0), (0, heads - x.shape[1])] + [(0, 0)] * (x.ndim - 2), constant_values=np.nan)

    return np.concatenate([np.stack([padded(layer) for layer in layers], axis=1) for layers in batches])


def reader_counts(at_0: Float64[np.ndarray, "B L H"], jackknife: Jackknife) -> tuple[Estimate, Estimate]:
    """Readers of each call [L], and of all: from heads whose interval lies above ε to those where it reaches ε."""
    found = jackknife.mean(at_0).estimate
    unknown = np.nan if found.n < MIN_PROMPTS else 0.0
    value, sure, maybe = found.value > EPSILON, found.low > EPSILON, np.isfinite(found.value) & ~(found.high <= EPSILON)
    low, high = sure.sum(-1) + unknown, maybe.sum(-1) + unknown
    each = Estimate(value.sum(-1).astype(float), low, high, found.n)
    total = [np.asarray(x.sum()) for x in (each.value, low, high)]
    return each, Estimate(total[0], total[1], total[2], found.n)


def _mean(x: Float64[np.ndarray, "*cells L H"], readers: Bool[np.ndarray, "L H"]) -> Cells:
    """The mean over readers, NaN without any."""
    chosen: Array = x[..., readers].mean(-1) if readers.any() else np.full(x.shape[:-2], np.nan)
    return chosen


def _variation(
    attention: Float64[np.ndarray, "B L H P"], jackknife: Jackknife, readers: Bool[np.ndarray, "L H"]
) -> tuple[Estimate, Estimate, dict[str, Estimate]]:
    """Standard deviation of a_i0 over rows, the share of its variance that all prompts have in common, means of both.

    The common variance never multiplies a prompt with itself: content that differs between prompts adds nothing to it.
    """
    centred = attention - attention.mean(-1, keepdims=True)
    variance = jackknife.mean((centred**2).mean(-1))
    with np.errstate(invalid="ignore", divide="ignore"):
        found = {
            "spread": combined(np.sqrt, variance),
            "positional": jackknife.inner(products(centred, centred)) / variance,
        }
    whole = {name: combined(lambda x: _mean(x, readers), each).estimate for name, each in found.items()}
    return found["spread"].estimate, found["positional"].estimate, whole
