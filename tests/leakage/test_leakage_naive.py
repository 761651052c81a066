"""Both splits recomputed by hand from full eager attention, in float64, one query and one reference at a time.

Nothing here is shared with the package but the plan: a plain attention function of our own, with transformers' own
N×N mask and repeated heads, gives the logits that enter the softmax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from posleak.analyses.trace.trace import Trace
from posleak.edits.context import Branches
from posleak.leakage import assemble, component
from posleak.leakage.power import unbiased
from posleak.models import Subject
from posleak.probe import Plan, default_plan
from posleak.runs.conditions import Conditions
from posleak.runs.loop import Passes
from posleak.runs.spec import MeasureSpec
from support.families import VOCAB, WINDOW, tiny

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
    moved: tuple[int, torch.Tensor] | None = None  # (position 0, its logits with it and all later queries)

    def part(self, start: int) -> Layer:
        """Queries and keys from `start` on, among themselves."""
        query, key = self.query[:, :, start:], self.key[:, :, start:]
        return Layer(query, key, self.seen[start:, start:], self.scaling)

    def logits(self, b: int, h: int) -> NDArray[np.float64]:
        logits: NDArray[np.float64] = (self.query[b, h] @ self.key[b, h].T * self.scaling).numpy()
        if self.moved is not None:
            logits[self.moved[0] :, self.moved[0]] = self.moved[1][b, h].numpy()
        return logits


def full_layers(model: PreTrainedModel, ids: torch.Tensor, visible: Any = None, fixed: int = 0) -> list[Layer]:
    """Every layer under a plain attention function.

    visible   [N, N] of each layer, instead of what is seen
    fixed     the text of this length at the end has its position 0 at this offset from all its queries, and its
              positions are smaller by one
    """
    layers = list[Layer]()
    positions = torch.arange(ids.shape[1]) - (torch.arange(ids.shape[1]) >= ids.shape[1] - fixed).long() * bool(fixed)

    def plain(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> tuple[torch.Tensor, None]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        seen = mask[0, 0] == 0 if visible is None else visible[len(layers)]
        s, moved = q @ k.transpose(-1, -2) * scaling, None
        if fixed:
            start = q.shape[2] - fixed
            there = [turned_all(model, len(layers), k[:, :, start], i - fixed) for i in range(fixed)]
            moved = start, torch.stack([(q[:, :, start + i] * there[i]).sum(-1) for i in range(fixed)], -1) * scaling
            s[:, :, start:, start] = moved[1]
        layers.append(Layer(q, k, seen.numpy(), scaling, moved))
        return (torch.softmax(s.masked_fill(~seen, -torch.inf), dim=-1) @ v).transpose(1, 2), None

    AttentionInterface.register("plain_test", plain)
    AttentionMaskInterface.register("plain_test", eager_mask)
    model.set_attn_implementation("plain_test")
    model.base_model(ids, attention_mask=torch.ones_like(ids), position_ids=positions[None], use_cache=False)
    model.set_attn_implementation("sdpa")
    return layers


def turned_all(model: PreTrainedModel, layer: int, keys: torch.Tensor, by: int) -> torch.Tensor:
    """Keys [B, H, E], all moved by a number of positions."""
    return torch.stack([torch.stack([turned(model, layer, key, by) for key in row]) for row in keys])


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


# The second split: branches after a donor


def branch_masks(own: NDArray[np.bool_], length: int) -> dict[str, torch.Tensor]:
    """bool [T, T] of each branch, key by key as definitions.md says it, for [donor of N + 64] [prompt of N].

    own: what the layer itself shows to each query. In branch C position 0 stands at offset N, and the positions of the
    prompt are smaller by one: the key of the donor before position 1 is at offset i from query i, not at i + 1.
    """
    donor, masks = length + 64, {name: torch.zeros(own.shape, dtype=torch.bool) for name in "ABC"}
    for name, seen in masks.items():
        seen[:donor] = torch.from_numpy(own[:donor])
        seen[donor, donor] = True  # position 0 sees itself
        for i in range(1, length):
            q = donor + i
            reach = int(own[q].sum()) if own[q].sum() <= q else 10**9  # of a window, or all
            offsets = {key: i - (key - donor) for key in range(donor, q + 1)}
            if name != "A":
                offsets |= {key: i + (donor - key) - (name == "C") for key in range(donor)}
            most = length - 1 if name == "C" else length
            near = [key for key, offset in offsets.items() if offset < min(reach, most) and key != donor]
            there = length if name == "C" else i
            seen[q, near + [donor] * (there < reach)] = True
    return masks


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


def naive_weights(layers: list[Layer], at: int, h: int, plan: Plan) -> NDArray[np.float64]:
    """w(δ): attention of the references to body keys at the offsets nearest to δ, mean over prompts and references."""
    layer, weights = layers[at], np.zeros(len(plan.offsets))
    for b in range(len(layer.query)):
        e = np.where(layer.seen, np.exp(layer.logits(b, h)), 0.0)
        for r in plan.references:
            for key in range(plan.origin, r + 1):
                distance = [abs(r - key - delta) for delta in plan.offsets]
                weights[distance.index(min(distance))] += e[r, key] / e[r].sum()
    return weights / (len(layer.query) * len(plan.references))


def naive_power(x: NDArray[np.float64], y: NDArray[np.float64], weights: NDArray[np.float64] | None) -> float:
    """⟨x, y⟩ of one head from the components [B, Q, D] of all prompts: no prompt is multiplied by itself."""
    B, powers = len(x), []
    for b in range(B):
        for c in range(B):
            if b != c:
                product = x[b] * y[c]
                even = np.nanmean(product)
                powers.append(even if weights is None else np.nansum(product * weights, axis=-1).mean())
    return float(np.mean(powers))


@pytest.mark.filterwarnings("ignore:the origin of:posleak.errors.PosleakWarning")
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "smollm3"])
def test_the_trace_agrees_with_a_naive_one(family: str, apart: bool) -> None:
    """T, T', D, O and Z of every layer, the parts of B, and both norms, in one sequence and in three."""
    origin = 1 if apart else 4
    spec, model = (
        MeasureSpec(length=N, prompts=ENOUGH, origin=origin),
        exact_rotation(tiny(family, dtype=torch.float64)),
    )
    conditions = Conditions(Subject.of(model, name=family), spec)
    ordinary_run = conditions.run()
    trace, plan, donor = Trace(ordinary_run, conditions.run(Branches(apart=apart).text)), spec.plan, N + 64
    assert trace.remainder < 1e-9
    ids = torch.from_numpy(conditions.tokens.after_donors(donor).batch(range(ENOUGH)))
    assert ids.shape == (ENOUGH, donor + N)
    alone = full_layers(model, ids[:, donor:])
    masks = [branch_masks(layer.seen, N) for layer in full_layers(model, ids)]
    a, b, c = (full_layers(model, ids, [mask[name] for mask in masks], N if name == "C" else 0) for name in "ABC")
    assert {int(row.sum()) for mask in masks for row in mask["C"][donor + 1 :]} <= {N, WINDOW}, "equally many keys"
    lends = [replace(layer, seen=mask["B"].numpy()) for layer, mask in zip(a, masks, strict=True)]
    for at, head in ((0, 0), (1, 2), (2, 1)):
        rows = {
            name: np.stack([naive_total(layers[at], k, head, plan, start, first) for k in range(ENOUGH)])
            for name, layers, start, first in (
                ("fresh", alone, 0, 0), ("T", a, donor, donor), ("T'", lends, donor, 0), ("D", b, donor, donor),
                ("O", b, donor, 0), ("Z", c, donor, 0),
            )
        }  # fmt: skip
        fresh, T, T_lent, D, D_lent, Z = rows.values()
        expected = {
            "total": fresh, "state": fresh - T, "earlier": ((T - D) + (T_lent - D_lent)) / 2,
            "here": ((D - D_lent) + (T - T_lent)) / 2, "origin": D_lent - Z, "left": Z,
            "order": (T - D) - (T_lent - D_lent),
        }  # fmt: skip
        if at:
            assert np.nanmax(np.abs(T - D)) > 0.1
            assert np.nanmax(np.abs(expected["order"])) > 1e-3
        for name, by_hand in expected.items():
            ours = trace.components[name].values[:, at, head]
            assert np.array_equal(np.isnan(ours), np.isnan(by_hand))
            assert np.nanmax(np.abs(ours - by_hand)) < EXACT, (at, head, name)
        weights = naive_weights(alone, at, head, plan)
        assert np.allclose(ordinary_run.data["weight"].values[:, at, head].mean(0), weights, atol=1e-9)
        for products, w in ((trace.products["all"], weights), (trace.products["all"].even, None)):
            assert products is not None
            for name, by_hand in expected.items():
                for sums, other in ((products.own, by_hand), (products.with_total, fresh)):
                    if name in sums:
                        power = float(unbiased(sums[name][at, head], ENOUGH))
                        assert power == pytest.approx(naive_power(by_hand, other, w), rel=1e-8, abs=EXACT), name
        parts = naive(model, at, b[at].part(donor), 1, head, plan)
        for name in ("mask", "drift", "sink"):
            ours = component(trace.branches.data, name).values[1, at, head]
            assert np.nanmax(np.abs(ours - parts[name])) < EXACT, (at, head, name)


def test_position_0_matters_in_branch_c() -> None:
    """The naive test could not fail if moving position 0 changed nothing: here it does, by more than 0.01 nats."""
    spec, model = MeasureSpec(length=N, prompts=ENOUGH), tiny("llama", dtype=torch.float64)
    trace = Trace.of(Conditions(Subject.of(model, name="llama"), spec))
    assert np.nanmax(np.abs(trace.components["origin"].values[:, 0])) > 0.01
