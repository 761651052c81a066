"""The split recomputed by hand from full eager attention, in float64, one query and one reference at a time.

Nothing here is shared with the package but the plan: a plain attention function of our own, with transformers' own
N×N mask and repeated heads, gives the logits that enter the softmax.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

from families import VOCAB, tiny
from posleak.leakage import assemble, component
from posleak.probe import Plan, default_plan
from posleak.runs.loop import measure_chunks

N, B = 53, 2


def logits_and_sight(
    model: PreTrainedModel, ids: torch.Tensor
) -> tuple[list[NDArray[np.float64]], list[NDArray[np.bool_]]]:
    """Full logits [B, H, N, N] and visible keys [N, N] of every layer."""
    logits, seen = [], []

    def plain(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> tuple[torch.Tensor, None]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        s = q @ k.transpose(-1, -2) * scaling
        logits.append(s.numpy())
        seen.append((mask[0, 0] == 0).numpy())
        return (torch.softmax(s + mask, dim=-1) @ v).transpose(1, 2), None

    AttentionInterface.register("plain_test", plain)
    AttentionMaskInterface.register("plain_test", eager_mask)
    model.set_attn_implementation("plain_test")
    model.base_model(ids, use_cache=False)
    model.set_attn_implementation("sdpa")
    return logits, seen


def naive(s: NDArray[np.float64], seen: NDArray[np.bool_], plan: Plan) -> dict[str, NDArray[np.float64]]:
    """definitions.md, line by line; s [N, N] of one head, seen [N, N]."""
    e = np.exp(np.where(seen, s, -np.inf))
    late = [*plan.references, plan.anchor]
    result = {
        name: np.full((len(plan.queries), len(plan.offsets)), np.nan) for name in ("mask", "drift", "sink", "mws")
    }
    n = {i: int(seen[i, 1:].sum()) for i in range(N)}
    for q, i in enumerate(plan.queries):
        for d, delta in enumerate(plan.offsets):
            if delta >= n[i] or any(delta >= n[r] for r in plan.references):
                continue
            steps = []
            for r in plan.references:
                row = np.exp(s[r])
                R = sum(row[r - x] for x in range(n[i]))
                o = row[r - n[i]] if r - n[i] >= 1 else 0.0
                later = [np.exp(s[x, x - n[r]]) for x in late if x > r]
                o_hat = float(np.mean(later)) if seen[r, 0] else 0.0
                k = max(o + (e[r, 0] - o_hat), 0.0) if seen[i, 0] else 0.0
                o = o if seen[i, 0] else 0.0
                body_i, z_i, z_r = e[i, 1:].sum(), e[i].sum(), e[r].sum()
                body_r = e[r, 1:].sum()
                mask = -(math.log(R + k) - math.log(z_r))
                drift = s[i, i - delta] - s[r, r - delta] - (math.log(body_i + k) - math.log(R + k))
                sink = -(math.log(z_i) - math.log(body_i + k))
                steps.append((mask, drift, sink, -(math.log(R + o) - math.log(body_r + o_hat))))
            for name, value in zip(result, np.mean(steps, axis=0), strict=True):
                result[name][q, d] = value
    return result


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "smollm3"])
def test_the_split_agrees_with_a_naive_one(family: str) -> None:
    ids = torch.randint(3, VOCAB, (B, N), generator=torch.Generator().manual_seed(1))
    plan, model = default_plan(N), tiny(family, dtype=torch.float64)
    logits, seen = logits_and_sight(model, ids)
    data = assemble(list(measure_chunks(model, [ids.numpy()], plan)), plan)
    for layer, head, b in ((0, 0, 0), (1, 2, 1), (2, 1, 0)):
        expected = naive(logits[layer][b, head], seen[layer], plan)
        for name, ours in (("mask", "mask"), ("drift", "drift"), ("sink", "sink"), ("mws", "mask_without_sink")):
            found = component(data, ours).values[b, layer, head]
            assert np.array_equal(np.isnan(found), np.isnan(expected[name]))
            assert np.nanmax(np.abs(found - expected[name])) < 1e-8, (layer, head, name)
