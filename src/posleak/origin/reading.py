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
from numpy.typing import NDArray
from torch import Tensor

from posleak.leakage import Bootstrap, Estimate
from posleak.leakage.power import gram_matrix, unbiased
from posleak.plain import plain
from posleak.probe import Call, Plan

from .projection import Projection

Array = NDArray[np.float64]

EPSILON = 0.3


@dataclass(frozen=True)
class LayerReading:
    """One attention call of a batch: attention [B, H, P] to position 0 of the plan's rows; written, along [B, H];
    values [B, K, Ev]: v_0."""

    attention: Tensor
    written: Tensor
    along: Tensor
    values: Tensor


@dataclass
class ReadingObserver:
    """Looks at the plan's rows of every attention call; one Projection for each call."""

    plan: Plan
    projections: Sequence[Projection]
    layers: list[LayerReading] = field(default_factory=list)

    def observe(self, call: Call, out: Tensor) -> None:
        self.layers.append(read(call, out, self.plan, self.projections[call.index].gram))

    def collect(self) -> list[LayerReading]:
        """The layers seen since the last call of this method."""
        layers, self.layers = self.layers, []
        return layers


def read(call: Call, out: Tensor, plan: Plan, gram: Tensor) -> LayerReading:
    """gram [H, Ev, Ev] of what the heads write; out [B, H, T, Ev] what they return."""
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


def attention_to_origin(call: Call, rows: Tensor) -> Tensor:
    """a_i0 [B, H, P] of the queries at `rows`, 0 where position 0 is out of sight. float64."""
    s = call.logits(rows).masked_fill_(~call.visibility.rows(rows).to(call.query.device), -torch.inf)
    log_z = s.logsumexp(-1)
    if call.s_aux is not None:
        log_z = torch.logaddexp(log_z, call.s_aux.to(log_z)[:, None])
    return (s[..., 0].double() - log_z.double()).exp().nan_to_num()


@dataclass(frozen=True)
class Reading:
    """All heads, [C, H] for C attention calls (NaN where a call has fewer heads); B prompts, P rows of the plan.

    attention   [B, C, H, P]  a_i0 at the plan's rows;  rows: their positions
    at_0        mean a_r0 over the reference queries;  written, spread, positional, along: see the module
    readers     bool [C, H]   at_0 > epsilon
    counts      [C]           readers of each call, resampled over prompts;  total: of all calls
    mean        at_0, written, spread, positional and along, each the mean over the readers
    heads       [C]           heads of each call;  layers [C]: the layer it is part of;  spaces [C]: output | value
    """

    rows: tuple[int, ...]
    epsilon: float
    attention: Array
    at_0: Estimate
    written: Estimate
    spread: Estimate
    positional: Estimate
    along: Estimate
    readers: NDArray[np.bool_]
    counts: Estimate
    total: Estimate
    mean: dict[str, Estimate]
    heads: tuple[int, ...]
    layers: tuple[int, ...]
    spaces: tuple[str, ...]
    modules: tuple[str | None, ...]

    @classmethod
    def of(
        cls, batches: Sequence[Sequence[LayerReading]], plan: Plan, found: Sequence[Projection], bootstrap: Bootstrap
    ) -> Reading:
        """batches: what a ReadingObserver collected from each batch of prompts."""
        attention, written, along = (_joined(batches, name) for name in ("attention", "written", "along"))
        late = slice(len(plan.queries), len(plan.queries) + len(plan.references))
        at_0 = attention[..., late].mean(-1)  # [B, C, H]
        counts, total = _counts(at_0, bootstrap)
        readers = at_0.mean(0) > EPSILON
        means = {"at_0": at_0, "written": written, "along": along}
        spread, positional, varies = _variation(attention, bootstrap, readers)
        return cls(
            rows=plan.rows, epsilon=EPSILON, attention=attention, at_0=bootstrap.mean(at_0),
            written=bootstrap.mean(written), spread=spread, positional=positional, along=bootstrap.mean(along),
            readers=readers, counts=counts, total=total,
            mean={name: bootstrap.mean(_mean(x, readers)) for name, x in means.items()} | varies,
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
            {"layer": self.layers[c], "call": c, "head": h, **{n: plain(getattr(self, n)[c, h]) for n in names}}
            for c, h in np.argwhere(self.readers).tolist()
        ]
        calls = [
            {"call": c, "layer": self.layers[c], "heads": self.heads[c], "readers": plain(self.counts[c]),
             "space": self.spaces[c], "projection": self.modules[c]}
            for c in range(len(self.heads))
        ]  # fmt: skip
        return {
            "epsilon": self.epsilon, "space": self.space, "readers": plain(self.total), "of": sum(self.heads),
            "mean": plain(self.mean), "at_0": plain(self.at_0.value), "calls": calls, "heads": records,
        }  # fmt: skip


def _joined(batches: Sequence[Sequence[LayerReading]], name: str) -> Array:
    """[B, C, H, …] over all batches; calls with fewer heads are filled up with NaN."""
    heads = max(layer.attention.shape[1] for layer in batches[0])

    def padded(layer: LayerReading) -> Array:
        x = getattr(layer, name).numpy()
        return np.pad(x, [(0, 0), (0, heads - x.shape[1])] + [(0, 0)] * (x.ndim - 2), constant_values=np.nan)

    return np.concatenate([np.stack([padded(layer) for layer in layers], axis=1) for layers in batches])


def _counts(at_0: Array, bootstrap: Bootstrap) -> tuple[Estimate, Estimate]:
    """Readers of each call [C], and of all calls, with every prompt's weight in the mean resampled."""
    weights = bootstrap.weights / bootstrap.weights.sum(1, keepdims=True)
    samples = (np.tensordot(weights, at_0, axes=(1, 0)) > EPSILON).sum(-1).astype(float)  # [S, C]
    value, n = (at_0.mean(0) > EPSILON).sum(-1).astype(float), bootstrap.prompts
    each = Estimate(value, *bootstrap.interval(samples), n=n)
    return each, Estimate(value.sum(), *bootstrap.interval(samples.sum(-1)), n=n)


def _mean(x: Array, readers: NDArray[np.bool_]) -> Array:
    """The mean over readers of x [S, C, H]: [S], NaN without any."""
    return x[:, readers].mean(-1) if readers.any() else np.full(len(x), np.nan)


def _variation(
    attention: Array, bootstrap: Bootstrap, readers: NDArray[np.bool_]
) -> tuple[Estimate, Estimate, dict[str, Estimate]]:
    """Standard deviation of a_i0 over rows, the share of its variance that all prompts have in common, means of both.

    The common variance never multiplies a prompt with itself: content that differs between prompts adds nothing to it.
    """
    centred = attention - attention.mean(-1, keepdims=True)
    gram = gram_matrix(centred, centred)  # [C, H, B, B]
    own = np.moveaxis(np.diagonal(gram, axis1=-2, axis2=-1), -1, 0)  # [B, C, H]
    weights = bootstrap.weights / bootstrap.weights.sum(1, keepdims=True)
    samples = np.tensordot(weights, own, axes=(1, 0))
    with np.errstate(invalid="ignore", divide="ignore"):
        share, shares = unbiased(gram) / own.mean(0), bootstrap.inner(gram) / samples
    n, found = bootstrap.prompts, dict[str, tuple[Estimate, Estimate]]()
    deviation = np.sqrt(own.mean(0))
    for name, value, drawn in (("spread", deviation, np.sqrt(samples)), ("positional", share, shares)):
        each = Estimate(value, *bootstrap.interval(drawn), n=n)
        whole = Estimate(_mean(value[None], readers)[0], *bootstrap.interval(_mean(drawn, readers)), n=n)
        found[name] = each, whole
    return found["spread"][0], found["positional"][0], {name: whole for name, (_, whole) in found.items()}
