"""Both splits recomputed by hand from full eager attention, in float64, one query and one reference at a time.

Nothing here is shared with the package but the plan: a plain attention function of our own, with transformers' own
N×N mask and repeated heads, gives the logits that enter the softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from posleak.analyses.trace.trace import BORROWED, Trace
from posleak.leakage import assemble, component
from posleak.models import Subject
from posleak.probe import Plan, default_plan
from posleak.runs.conditions import Conditions
from posleak.runs.loop import Passes
from posleak.runs.spec import MeasureSpec
from support.families import VOCAB, tiny

N, B, ENOUGH = 53, 2, 4
EXACT = 1e-8


def exact_rotation(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its cosines and sines in float64: in float32 two ways to turn a key differ by 1e-7."""

    def double(module: Any, args: Any, kwargs: Any, out: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kind = kwargs.get("layer_type") or (args[2] if len(args) > 2 else None)
        frequencies = getattr(module, f"{kind}_inv_freq" if kind else "inv_freq").double()
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        angle = torch.cat([positions[..., None].double() * frequencies] * 2, dim=-1)
        return angle.cos(), angle.sin()

    body: Any = model.base_model
    body.rotary_emb.register_forward_hook(double, with_kwargs=True)
    return model


@dataclass
class Layer:
    """One layer in full: queries and keys [B, H, N, E], which keys are seen [N, N], the factor of the products."""

    query: torch.Tensor
    key: torch.Tensor
    seen: NDArray[np.bool_]
    scaling: float

    def part(self, start: int) -> Layer:
        """Queries and keys from `start` on, among themselves."""
        query, key = self.query[:, :, start:], self.key[:, :, start:]
        return Layer(query, key, self.seen[start:, start:], self.scaling)

    def logits(self, b: int, h: int) -> NDArray[np.float64]:
        logits: NDArray[np.float64] = (self.query[b, h] @ self.key[b, h].T * self.scaling).numpy()
        return logits


def full_layers(model: PreTrainedModel, ids: torch.Tensor, visible: Any = None) -> list[Layer]:
    """Every layer under a plain attention function; `visible` [N, N] narrows what is seen."""
    layers = []

    def plain(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> tuple[torch.Tensor, None]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        seen = mask[0, 0] == 0
        seen = seen if visible is None else seen & visible
        layers.append(Layer(q, k, seen.numpy(), scaling))
        s = (q @ k.transpose(-1, -2) * scaling).masked_fill(~seen, -torch.inf)
        return (torch.softmax(s, dim=-1) @ v).transpose(1, 2), None

    AttentionInterface.register("plain_test", plain)
    AttentionMaskInterface.register("plain_test", eager_mask)
    model.set_attn_implementation("plain_test")
    model.base_model(ids, use_cache=False)
    model.set_attn_implementation("sdpa")
    return layers


def turned(model: PreTrainedModel, layer: int, key: torch.Tensor, by: int) -> torch.Tensor:
    """A key [E] moved by a number of positions with the model's own cosines and sines, halves paired."""
    body: Any = model.base_model
    if getattr(body.layers[layer].self_attn, "use_rope", True) in (False, 0):
        return key
    kinds: Any = getattr(model.config, "layer_types", None)
    rotary = body.rotary_emb
    at = torch.tensor([[by]])
    try:
        cos, sin = rotary(key[None, None], at, layer_type=kinds[layer])
    except (TypeError, KeyError, AttributeError):
        cos, sin = rotary(key[None, None], at)
    first, second = key.chunk(2)
    moved: torch.Tensor = key * cos[0, 0] + torch.cat([-second, first]) * sin[0, 0]
    return moved


def naive(model: PreTrainedModel, at: int, layer: Layer, b: int, h: int, plan: Plan) -> dict[str, NDArray[np.float64]]:
    """definitions.md, line by line, for one head."""
    s, seen, m = layer.logits(b, h), layer.seen, plan.origin
    e = np.where(seen, np.exp(s), 0.0)
    result = {
        name: np.full((len(plan.queries), len(plan.offsets)), np.nan) for name in ("mask", "drift", "sink", "mws")
    }
    n = {i: int(seen[i, m:].sum()) for i in plan.rows}
    seen_origin = {i: [j for j in range(m) if seen[i, j]] for i in plan.rows}
    for q, i in enumerate(plan.queries):
        for r in plan.references:
            row = np.exp(s[r])
            R = sum(row[r - x] for x in range(n[i]))
            k = sum(
                math.exp(float(layer.query[b, h, r] @ turned(model, at, layer.key[b, h, j], r - i)) * layer.scaling)
                for j in seen_origin[i]
            )
            body_i, z_i, z_r = e[i, m:].sum(), e[i].sum(), e[r].sum()
            more, m_r = min(n[i] + len(seen_origin[i]), n[r]), len(seen_origin[r])
            mws = math.log(e[r, m:].sum() * (n[r] + m_r) / n[r]) - math.log(sum(row[r - x] for x in range(more)))
            mask = math.log(z_r) - math.log(R + k)
            sink = math.log(1 + k / R) - math.log(1 + (z_i - body_i) / body_i)
            for d, delta in enumerate(plan.offsets):
                if delta >= n[i] or any(delta >= n[x] for x in plan.references):
                    continue
                drift = s[i, i - delta] - math.log(body_i) - (s[r, r - delta] - math.log(R))
                for name, value in (("mask", mask), ("drift", drift), ("sink", sink), ("mws", mws)):
                    so_far = result[name][q, d]
                    result[name][q, d] = value / len(plan.references) + (0.0 if np.isnan(so_far) else so_far)
    return result


@pytest.mark.parametrize("origin", [1, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "smollm3"])
def test_the_split_agrees_with_a_naive_one(family: str, origin: int) -> None:
    ids = torch.randint(3, VOCAB, (B, N), generator=torch.Generator().manual_seed(1))
    plan, model = default_plan(N, origin=origin), exact_rotation(tiny(family, dtype=torch.float64))
    layers = full_layers(model, ids)
    data = assemble(list(Passes(model, plan).measure([ids.numpy()])), plan)
    for layer, head, b in ((0, 0, 0), (1, 2, 1), (2, 1, 0)):
        expected = naive(model, layer, layers[layer], b, head, plan)
        for name, ours in (("mask", "mask"), ("drift", "drift"), ("sink", "sink"), ("mws", "mask_without_sink")):
            values = component(data, ours).values[b, layer, head]
            assert np.array_equal(np.isnan(values), np.isnan(expected[name]))
            assert np.nanmax(np.abs(values - expected[name])) < EXACT, (layer, head, name)


# The second split: a borrowed context


def lent_mask(length: int) -> torch.Tensor:
    """bool [T, T], key by key as definitions.md says it, for [donor of N + 64] [text of N]."""
    donor = length + 64
    seen = torch.zeros(donor + length, donor + length, dtype=torch.bool)
    for q in range(donor):
        for key in range(q + 1):
            seen[q, key] = True
    seen[donor, donor] = True  # the text's position 0 sees itself
    for i in range(1, length):
        own = [donor + j for j in range(i + 1)]  # position 0 among them
        lacks = (length - 1) - (len(own) - 1)  # to N - 1 keys besides position 0
        for key in [*own, *range(donor - lacks, donor)]:
            seen[donor + i, key] = True
    return seen


def naive_total(layer: Layer, b: int, h: int, plan: Plan, start: int, first: int) -> NDArray[np.float64]:
    """log a_i(δ) − mean over r of log a_r(δ), of the text after `start`, rows over the keys from `first` on."""
    s, m = layer.logits(b, h), plan.origin
    weights = np.where(layer.seen, np.exp(s), 0.0)[:, first:].sum(-1)
    n = {p: int(layer.seen[start + p, start + m :].sum()) for p in plan.rows}

    def log_a(p: int, delta: int) -> float:
        return float(s[start + p, start + p - delta] - math.log(weights[start + p]))

    result = np.full((len(plan.queries), len(plan.offsets)), np.nan)
    for q, i in enumerate(plan.queries):
        for d, delta in enumerate(plan.offsets):
            if delta < n[i] and all(delta < n[r] for r in plan.references):
                late = [log_a(r, delta) for r in plan.references]
                result[q, d] = log_a(i, delta) - sum(late) / len(late)
    return result


@pytest.mark.filterwarnings("ignore:the origin of:posleak.errors.PosleakWarning")
@pytest.mark.parametrize("origin", [1, 4])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "smollm3"])
def test_the_trace_agrees_with_a_naive_one(family: str, origin: int) -> None:
    spec = MeasureSpec(length=N, prompts=ENOUGH, origin=origin)
    model = exact_rotation(tiny(family, dtype=torch.float64))
    conditions = Conditions(Subject.of(model, name=family), spec)
    trace, plan, donor = Trace.of(conditions), spec.plan, N + 64
    assert trace.remainder < 1e-9
    ids = conditions.tokens.after_donors().batch(range(B))
    assert ids.shape == (B, donor + N)
    ordinary = full_layers(model, torch.from_numpy(ids[:, donor:]))
    borrowed = full_layers(model, torch.from_numpy(ids), lent_mask(N))
    for at, head, b in ((0, 0, 0), (1, 2, 1), (2, 1, 0)):
        T = naive_total(ordinary[at], b, head, plan, 0, 0)
        D = naive_total(borrowed[at], b, head, plan, donor, donor)
        left = naive_total(borrowed[at], b, head, plan, donor, 0)
        if at:
            assert np.nanmax(np.abs(T - D)) > 0.1
        for name, by_hand in {"total": T, "direct": D, "origin": left, "earlier": T - D, "here": D - left}.items():
            ours = trace.components[name].values[b, at, head]
            assert np.array_equal(np.isnan(ours), np.isnan(by_hand))
            assert np.nanmax(np.abs(ours - by_hand)) < EXACT, (at, head, name)
        parts = naive(model, at, borrowed[at].part(donor), b, head, plan)
        for name in ("mask", "drift", "sink"):
            ours = component(conditions.run(BORROWED).data, name).values[b, at, head]
            assert np.nanmax(np.abs(ours - parts[name])) < EXACT, (at, head, name)
