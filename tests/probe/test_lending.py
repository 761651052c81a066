"""Lending by head: who sees lent keys, copies of a prompt after one donor, and derivatives with respect to shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posleak.edits import parse_edit
from posleak.edits.context import LendByHead
from posleak.errors import UnsupportedError
from posleak.inputs import prepare
from posleak.leakage import LeakageObserver, sampled_total
from posleak.probe import Call, Collector, attach, default_plan, relative_difference
from posleak.probe.call import attend
from support.errors import raises
from support.families import FAMILIES, VOCAB, tiny
from support.inputs_subject import stub_subject
from tools.shrink import tiny_model

N, START = 40, 104
PLAN = default_plan(N)
SOME = ["llama", "mistral", "gemma2", "gemma3_text", "gpt_oss", "smollm3", "diffllama", "gpt_neox"]
"""Windows, soft-caps, learned sink logits, layers without rotation, two calls per layer, grouped queries, partial
rotation."""


def tokens(batch: int = 3) -> Tensor:
    donors = prepare(stub_subject(vocab_size=VOCAB), "random", length=N, seed=0).after_donors(START)
    return torch.from_numpy(donors.batch(range(batch)))


def calls(model: PreTrainedModel) -> list[int]:
    """The number of heads of every attention call."""
    with attach(model, [look := Collector(lambda call, out: call.heads)]) as probe:
        probe.forward(tokens(1)[:, START:])
    return look.collect()


def shares(model: PreTrainedModel, copies: int, seed: int = 0) -> Tensor:
    heads = calls(model)
    return torch.rand(copies, len(heads), max(heads), generator=torch.Generator().manual_seed(seed)).round()


def read_total(call: Call, out: Tensor) -> Tensor:
    assert call.copies is not None
    return sampled_total(call.copies.call, PLAN)


def totals(model: PreTrainedModel, share: Tensor, *, apart: bool = False) -> list[Tensor]:
    with attach(model, [look := Collector(read_total)], [LendByHead(share, apart)]) as probe:
        probe.forward(tokens())
    return look.collect()


def naive(call: Call, heads: Tensor) -> Tensor:
    """Attention with full matrices in float64; heads [H]: those that see the last keys of the donor."""
    assert call.lending is not None
    T = call.query.shape[2]
    s = call.logits(torch.arange(T)).double()
    seen = torch.where(heads[:, None, None], call.visibility.dense(), call.lending.own.dense())
    e = s.masked_fill(~seen, -torch.inf).exp()
    z = e.sum(-1, keepdim=True)
    if call.s_aux is not None:
        z = z + call.s_aux.double().exp()[:, None, None]
    value = call.value.double().repeat_interleave(call.heads // call.value.shape[1], dim=1)
    return (e / z) @ value


@pytest.mark.parametrize("family", SOME)
def test_attention_by_head_agrees_with_full_matrices(family: str) -> None:
    model = tiny(family)
    heads = calls(model)[0]
    chosen = torch.arange(heads) % 2 == 0
    scope = ",".join(f"{layer}.{head}" for layer in range(3) for head in range(heads) if chosen[head])
    gaps = list[float]()

    def compare(call: Call, out: Tensor) -> None:
        gaps.append(relative_difference(out.double(), naive(call, chosen)))

    with attach(model, [Collector(compare)], [parse_edit(f"context=borrowed@{scope}")]) as probe:
        probe.forward(tokens())
    assert len(gaps) == len(calls(model))
    assert max(gaps) < 1e-5


@dataclass
class Outputs:
    out: list[Tensor] = field(default_factory=list)

    def observe(self, call: Call, out: Tensor) -> None:
        self.out.append(out)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_lending_in_a_head_changes_no_other_head_of_its_layer_and_no_earlier_layer(family: str) -> None:
    """L14, to the bit."""
    model, both = tiny(family), list[list[Tensor]]()
    for scope in ("9", "1.1"):
        with attach(model, [look := Outputs()], [parse_edit(f"context=borrowed@{scope}")]) as probe:
            probe.forward(tokens())
        both.append(look.out)
    (first, second, third), (first_lent, second_lent, third_lent) = both
    assert torch.equal(first_lent, first)
    assert torch.equal(second_lent[:, [0, 2]], second[:, [0, 2]])
    assert relative_difference(second_lent[:, 1], second[:, 1]) > 1e-2
    assert relative_difference(third_lent, third) > 1e-3, "a later layer reads the change"


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_copies_in_one_sequence_agree_with_sequences_of_their_own(family: str) -> None:
    model = tiny(family)
    share = shares(model, 3)
    for joined, apart in zip(totals(model, share), totals(model, share, apart=True), strict=True):
        assert torch.equal(joined.isnan(), apart.isnan())
        assert float((joined - apart).abs().nan_to_num().max()) < 2e-4 * max(
            1.0, float(joined.nan_to_num().abs().max())
        )


@pytest.mark.parametrize("family", SOME)
def test_each_copy_agrees_with_the_edit_of_its_heads(family: str) -> None:
    """Against `context=borrowed@…`, whose rows are computed by the observer of measurements."""
    model = tiny(family)
    heads, share = calls(model), shares(model, 2, seed=1)
    share = share[:, :1].expand(-1, len(heads), -1) if len(heads) > 3 else share  # two calls of one layer
    got = totals(model, share)
    layers = len(heads) if len(heads) == 3 else len(heads) // 2
    for copy in range(2):
        scope = ",".join(
            f"{layer}.{head}" for layer in range(layers) for head in range(heads[0]) if share[copy, min(layer, 2), head]
        )
        with attach(model, [look := LeakageObserver(PLAN)], [parse_edit(f"context=borrowed@{scope}")]) as probe:
            probe.forward(tokens())
        for parts, total in zip(look.collect(), got, strict=True):
            expected = parts.mask[..., None] + parts.drift + parts.sink[..., None]
            own = total.unflatten(0, (3, 2))[:, copy]
            assert torch.equal(own.isnan(), expected.isnan())
            assert float((own - expected).nan_to_num().abs().max()) < 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_derivatives_agree_with_finite_differences(family: str) -> None:
    """Of the sum of all totals with respect to the share of each head, in float64."""
    model, step = tiny(family, scale=4.0, dtype=torch.float64), 2e-3
    share = torch.full((1, 3, 3), 0.4, dtype=torch.float64, requires_grad=True)

    def summed(share: Tensor) -> Tensor:
        with attach(model, [look := Collector(read_total)], [LendByHead(share)]) as probe:
            probe.forward(tokens(), grad=True)
        weights = torch.Generator().manual_seed(1)
        layers = [x.nan_to_num() for x in look.collect()]
        return torch.stack([(x * torch.rand(x.shape, generator=weights)).sum() for x in layers]).sum()

    (gradient,) = torch.autograd.grad(summed(share), share)
    for layer, head in ((0, 0), (0, 2), (1, 1)):
        moved = torch.zeros_like(share)
        moved[0, layer, head] = step
        with torch.no_grad():
            difference = (summed(share + moved) - summed(share - moved)) / (2 * step)
        assert float(gradient[0, layer, head]) == pytest.approx(float(difference), rel=5e-3, abs=1e-3)
    assert float(gradient[0, 2].abs().max()) == 0, "no layer reads what the last one writes"


def test_a_share_between_mixes_the_two_outputs() -> None:
    model = tiny("llama")

    def compare(call: Call, out: Tensor) -> None:
        assert call.copies is not None
        own = call.copies.call
        lending = own.lending
        assert lending is not None
        from dataclasses import replace

        one, other = (
            attend(replace(own, lending=replace(lending, share=torch.full_like(lending.share, x)))) for x in (0.0, 1.0)
        )
        mixed = 0.7 * one + 0.3 * other
        assert relative_difference(attend(own), mixed) < 1e-6
        assert relative_difference(one, other) > 1e-3

    with attach(model, [Collector(compare)], [LendByHead(torch.full((1, 3, 3), 0.3))]) as probe:
        probe.forward(tokens())


def test_models_with_a_bias_need_sequences_of_their_own() -> None:
    model = tiny_model("bloom")
    share = torch.ones(2, model.config.num_hidden_layers, model.config.num_attention_heads)
    donors = torch.randint(3, int(model.config.vocab_size), (2, START + N), generator=torch.Generator().manual_seed(0))
    for apart in (False, True):
        with attach(model, [look := Collector(read_total)], [LendByHead(share, apart)]) as probe:
            if apart:
                probe.forward(donors)
                assert np.isfinite(look.collect()[0].nan_to_num().numpy()).all()
            else:
                with raises(UnsupportedError, what="bias", remedy="apart=True"):
                    probe.forward(donors)


def test_the_scope_of_heads_is_checked() -> None:
    text = "context=borrowed@0.1,2.0"
    assert parse_edit(text).text == text
    assert partial(parse_edit, "context=borrowed@1.1")().text == "context=borrowed@1.1"
