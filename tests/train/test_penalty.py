"""The differentiable leakage: it is the measured power, its gradient is that of finite differences, and it trains."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import posleak as pl
from posleak.errors import InputError, UnsupportedError
from posleak.probe.rows import References
from posleak.train import leakage, shared_pass
from posleak.train.penalty import COMPONENTS
from support.errors import raises
from support.families import VOCAB, tiny

NORMS = ("attention", "even")
EVERY = pytest.mark.parametrize(("part", "norm"), [(part, norm) for part in COMPONENTS for norm in NORMS])
FAMILIES = ("llama", "gpt_neox", "mistral", "gemma2", "gpt_oss", "smollm3", "phi3")
STEP = 1e-4
"""Of the finite differences, relative to the weights."""
FLOAT64, FLOAT32_NORMS = 1e-5, 5e-3
"""Relative agreement with finite differences. transformers computes most normalisations in float32 in every dtype, whose
rounding divided by STEP is the second bound; those of GPT-NeoX are computed in float64."""


def trainable(family: str, **more: Any) -> PreTrainedModel:
    return tiny(family, scale=4.0, **more).requires_grad_(True)


def batch(prompts: int = 5, length: int = 48, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (prompts, length), generator=generator)


def gradient(model: PreTrainedModel, value: Tensor) -> list[Tensor]:
    model.zero_grad()
    value.backward()  # type: ignore[no-untyped-call]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_close(one: list[Tensor], other: list[Tensor], tolerance: float) -> None:
    assert len(one) == len(other) > 0
    size = math.sqrt(sum(float((x**2).sum()) for x in one))
    assert math.sqrt(sum(float(((x - y) ** 2).sum()) for x, y in zip(one, other, strict=True))) <= tolerance * size


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore::posleak.errors.PosleakWarning")
def test_the_value_is_the_measured_power(family: str) -> None:
    model, ids = trainable(family, dtype=torch.float64), batch()
    model_powers = pl.measure(model, ids.numpy()).summary.model["all"].norms
    for part in COMPONENTS:
        for norm in NORMS:
            measured = float(model_powers[norm].power[part].value)
            assert leakage(model, ids, part, norm).item() == pytest.approx(measured, rel=1e-12, abs=1e-14)


@EVERY
@pytest.mark.parametrize("family", ["gpt_neox", "llama", "mistral", "gpt_oss"])
def test_the_gradient_is_that_of_finite_differences(family: str, part: str, norm: str) -> None:
    model, ids = trainable(family, dtype=torch.float64), batch()
    exact = gradient(model, leakage(model, ids, part, norm))
    used = [p for p in model.parameters() if p.grad is not None]
    torch.manual_seed(1)  # along a random direction, to find missing terms, and the gradient, so that the slope is steep
    size = math.sqrt(sum(float((g**2).sum()) for g in exact))
    direction = [torch.randn_like(p) * p.detach().abs().mean() + g / size for p, g in zip(used, exact, strict=True)]
    ends = []
    for sign in (1, -1):
        moved = copy.deepcopy(model)
        by_name = dict(moved.named_parameters())
        names = [name for name, p in model.named_parameters() if p.grad is not None]
        with torch.no_grad():
            for name, d in zip(names, direction, strict=True):
                by_name[name].add_(d, alpha=sign * STEP)
            ends.append(leakage(moved, ids, part, norm).item())
    slope = sum(float((g * d).sum()) for g, d in zip(exact, direction, strict=True))
    tolerance = FLOAT64 if family == "gpt_neox" else FLOAT32_NORMS
    assert slope == pytest.approx((ends[0] - ends[1]) / (2 * STEP), rel=tolerance)


def test_learned_sink_logits_have_a_gradient() -> None:
    model, ids = trainable("gpt_oss", dtype=torch.float64), batch()
    sinks = [p for name, p in model.named_parameters() if name.endswith("sinks")]
    gradient(model, leakage(model, ids))
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in sinks)


@pytest.mark.parametrize("part", COMPONENTS)
def test_constant_weights_have_no_gradient_of_their_own(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = trainable("gpt_neox", dtype=torch.float64), batch()
    whole = leakage(model, ids, part)
    constant = leakage(model, ids, part, constant_weights=True)
    assert whole.item() == constant.item()
    without = gradient(model, constant)
    original = References.by_offset
    monkeypatch.setattr(References, "by_offset", lambda *x: original(*x).detach())
    assert_close(without, gradient(model, leakage(model, ids, part)), 1e-12)
    assert not torch.allclose(without[0], gradient(model, whole)[0])


@EVERY
def test_a_shared_pass_is_the_pass_of_its_own(part: str, norm: str) -> None:
    model, ids = trainable("mistral", dtype=torch.float64), batch()
    alone = leakage(model, ids, part, norm)
    with shared_pass(model, ids, part, norm) as shared:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        together = shared.leakage()
    assert together.item() == pytest.approx(alone.item(), rel=1e-12)
    plain = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.item() == pytest.approx(plain.item(), rel=1e-12)
    expected = gradient(model, plain + 0.5 * alone)
    assert_close(expected, gradient(model, loss + 0.5 * together), 1e-6)


def test_a_shared_pass_keeps_the_training_mode() -> None:
    model, ids = trainable("gpt_neox", hidden_dropout=0.5), batch()
    model.train()
    with shared_pass(model, ids) as shared:
        losses = [model(input_ids=ids, labels=ids, use_cache=False).loss.item() for _ in range(2)]
        assert shared.leakage().requires_grad
    assert losses[0] != losses[1]  # dropout was active
    assert model.training
    assert model.config._attn_implementation != "posleak"
    leakage(model, ids)
    assert model.training


def test_autocast_does_not_round_the_rows() -> None:
    model, ids = trainable("llama"), batch()
    with torch.autocast("cpu", dtype=torch.bfloat16), shared_pass(model, ids) as shared:
        model(input_ids=ids, use_cache=False)
        rounded = shared.leakage()
    assert rounded.dtype == torch.float64
    assert rounded.item() == pytest.approx(leakage(model, ids).item(), rel=0.1)


def test_without_gradients_there_is_a_value() -> None:
    model, ids = trainable("llama"), batch()
    with torch.no_grad():
        assert not leakage(model, ids).requires_grad


@pytest.mark.parametrize(("family", "part"), [("llama", "total"), ("llama", "mask"), ("gpt2", "residual")])
@pytest.mark.filterwarnings("ignore:.*origin keys cannot be moved:posleak.errors.PosleakWarning")
def test_training_on_the_penalty_lowers_the_leakage(family: str, part: str) -> None:
    """Fresh prompts in each of 20 steps. On unseen prompts, the whole interval ends below 0.7 of that at the start.

    The residual needs a model that knows positions: GPT-2 has learned ones.
    """
    model = tiny(family, scale=1.0, **({"n_head": 3, "n_embd": 30} if family == "gpt2" else {})).requires_grad_(True)
    unseen: dict[str, Any] = {"length": 48, "prompts": 64, "seed": 1_000}
    before = pl.measure(model, **unseen).summary.model["all"].power[part]
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(20):
        optimiser.zero_grad()
        leakage(model, batch(8, seed=step), part).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    after = pl.measure(model, **unseen).summary.model["all"].power[part]
    assert after.high < 0.7 * before.low


def test_what_cannot_be_a_penalty_is_refused() -> None:
    model, ids = trainable("llama"), batch()
    with raises(InputError, got="(1, 48)", remedy="two or more"):
        leakage(model, ids[:1])
    with raises(InputError, got="drifts"):
        leakage(model, ids, "drifts")
    with raises(InputError, got="attentive", remedy="attention"):
        leakage(model, ids, norm="attentive")
    with raises(InputError, got="30 tokens", expected="48 tokens"), shared_pass(model, ids):
        model(input_ids=ids[:, :30])
    with raises(InputError, what="no forward pass"), shared_pass(model, ids) as shared:
        shared.leakage()
    with raises(UnsupportedError, remedy="requires_grad_"):
        leakage(model.requires_grad_(False), ids)
    model.requires_grad_(True)
    model.activation_checkpointing_enable()
    model.train()
    with raises(UnsupportedError, remedy="a pass of its own"), shared_pass(model, ids):
        pass
    assert leakage(model, ids).requires_grad
    with raises(UnsupportedError, what="dropout"):
        attention = trainable("gpt_neox", attention_dropout=0.5)
        attention.train()
        with shared_pass(attention, ids):
            attention(input_ids=ids)
