"""Position 0 is a closed system in every family, and the check sees a model in which it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from posleak.analyses.origin.states import Closure, alone, closure, require_one_width, states
from posleak.errors import UnsupportedError
from posleak.probe import Call, Edit, attach, backbone, relative_difference
from posleak.typed import plain
from support.errors import raises
from support.families import FAMILIES, VOCAB, tiny
from tools.shrink import tiny_model

B, N = 5, 37


def tokens(batch: int = B, length: int = N) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(7))


class Bidirectional(Edit):
    def edit(self, call: Call) -> Call:
        return replace(call, visibility=call.visibility.with_rule("all", lambda b, h, q, k: (q >= 0) & (k >= 0)))


@pytest.mark.parametrize("family", FAMILIES)
def test_position_zero_is_closed(family: str) -> None:
    found = closure(tiny(family), tokens(), batch=2)
    assert found.ok
    assert found.worst <= 1e-5
    assert len(found.per_layer) == 4
    assert found.n == B


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_tokens_are_closed_too(family: str) -> None:
    """L7: the states of the first k tokens, at every depth, are those of the sequence of k tokens."""
    model, ids = tiny(family), tokens(2)
    with attach(model) as probe:
        whole = probe.forward(ids, output_hidden_states=True).hidden_states
        for k in (1, 4, 13):
            cut = probe.forward(ids[:, :k], output_hidden_states=True).hidden_states
            gaps = [relative_difference(a[:, :k], b) for a, b in zip(whole, cut, strict=True)]
            assert max(gaps) < 1e-4, (k, gaps)


def test_a_mask_that_is_off_breaks_it_after_the_first_layer() -> None:
    found = closure(tiny("llama"), tokens(), edits=[Bidirectional()])
    assert not found.ok
    assert found.per_layer[0] == 0, "the embedding has not met the attention"
    assert min(found.per_layer[1:]) > 1e-2
    assert found.as_dict()["worst"] == found.worst


def test_gaps_are_told_by_depth_and_by_prompt() -> None:
    x = torch.ones(3, 4)
    moved = x.clone()
    moved[1] *= 1.5
    found = Closure.of([x, moved, x], [x, x, x], torch.float32)
    assert found.per_layer == (0, 0.5, 0)
    assert found.per_prompt == (0, 0.5, 0)
    assert found.n == 3


def test_a_state_that_is_not_a_number_is_not_closed() -> None:
    x = torch.ones(2, 3)
    found = Closure.of([x, x * torch.nan], [x, x], torch.float32)
    assert not found.ok
    assert plain(found)["worst"] is None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_state_is_the_final_norms_input(family: str) -> None:
    model = tiny(family)
    with attach(model) as probe:
        x = states(probe, tokens())
        hidden = probe.forward(tokens(), output_hidden_states=True).hidden_states
    norm = next(m for n, m in reversed(list(backbone(model).named_children())) if "norm" in n)
    assert len(x) == len(hidden) == 4
    assert torch.allclose(norm(x[-1]), hidden[-1], atol=1e-5)
    assert not torch.allclose(x[-1], hidden[-1], atol=1e-3)


def test_a_model_without_a_final_norm_keeps_its_last_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    base = backbone(model)
    with attach(model) as probe:
        before = states(probe, tokens())[-1]
        monkeypatch.setattr(base, "norm", torch.nn.Identity())
        assert torch.allclose(states(probe, tokens())[-1], before)


@pytest.mark.parametrize("family", ["hy_v4", "qwen4_exp_text", "gemma3n_text"])
def test_several_streams_stand_side_by_side_at_every_depth(family: str) -> None:
    """Also at the last one, which two of these families mix into one stream before they return it."""
    model, seen = tiny_model(family), list[torch.Tensor]()
    layers: Any = model.get_submodule("model.layers")
    layers[-1].register_forward_hook(lambda module, args, out: seen.append(out[0] if isinstance(out, tuple) else out))
    with attach(model) as probe:
        x = states(probe, tokens() % 100)
    assert {depth.shape for depth in x} == {(B, N, 4 * 64)}
    last = seen[-1]  # after the passes with which the model was attached
    streams = last.movedim(0, 2) if family == "gemma3n_text" else last
    assert torch.equal(x[-1], streams.reshape(B, N, -1))
    assert alone(model, torch.arange(3, 9)).states.shape == (6, len(x), 4 * 64)
    assert closure(model, tokens(2) % 100).ok


def test_a_last_state_of_another_width_is_refused_by_name() -> None:
    """As it is where the model mixes its streams outside of any module."""
    x = (torch.zeros(2, 1, 30), torch.zeros(2, 1, 7))
    with raises(
        UnsupportedError, where="LlamaForCausalLM", got="7, 30", remedy=("`posleak measure`", "`posleak trace`")
    ) as refused:
        require_one_width(x, tiny("llama"))
    assert refused.value.got == "widths 7, 30"
    assert require_one_width(x[:1], tiny("llama")) == x[:1]


def test_one_token_sequences_do_not_depend_on_their_batch() -> None:
    model, ids = tiny("gemma3_text"), torch.arange(3, 60)
    whole, parts = alone(model, ids, batch=100), alone(model, ids, batch=7)
    assert whole.states.shape == (57, 4, 30)
    assert [v.shape for v in whole.values] == [(57, 1, 10)] * 3
    assert torch.allclose(whole.states, parts.states, rtol=1e-5, atol=1e-5)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(whole.values, parts.values))


@pytest.mark.real
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_a_trained_model_is_closed_to_rounding(name: str) -> None:
    from posleak.inputs import prepare
    from posleak.models import load

    subject = load(name, device="cpu", dtype="float32")
    ids = prepare(subject, "random", length=64, seed=1).batch(range(3))
    ids[1:, 0] = ids[1:, 5]
    found = closure(subject.model, torch.from_numpy(ids))
    assert np.all(np.array(found.per_layer) <= 1e-5)
