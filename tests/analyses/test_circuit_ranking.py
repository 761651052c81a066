"""The ranking of heads by integrated gradients, and the passes in which sets of heads attend to lent keys."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.stats import spearmanr

import posleak as pl
from posleak.analyses.circuit.lending import (
    NO_HEAD,
    TOKENS_WITH_GRAPH,
    LendingPasses,
    LendingStudy,
    circuit_plan,
    copies_at_once,
    tokens_after_donor,
    total_of_copies,
)
from posleak.analyses.circuit.ranking import (
    Ranking,
    derivatives,
    power,
    rank,
    rank_by_intervention,
    recomputing,
    weights,
)
from posleak.defaults import TOKENS_AT_ONCE
from posleak.edits.context import LendByHead
from posleak.errors import InputError, UnsupportedError
from posleak.models import Subject
from posleak.probe.attachment import decoder_layers
from posleak.runs.memory import MemoryPlan, ModelSizes
from support.circuit_tiny import LENGTH as N, counting, passes, quiet, study
from support.errors import raises
from support.families import tiny
from tools.shrink import tiny_model


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_the_weights_of_a_ranking_are_those_of_a_measurement(family: str) -> None:
    subject = Subject.of(tiny(family), name="tiny")
    run = pl.measure(subject, length=N, prompts=6)
    weight = passes(subject, count=6).weight()
    assert np.nanmax(np.abs(weight.values - run.data["weight"].values)) < 1e-6


@pytest.mark.parametrize(("name", "inputs"), [("zoo-text-rope", "random"), ("zoo-text-window", "text:stdlib")])
def test_gradients_rank_heads_as_lending_in_each_alone(name: str, inputs: str) -> None:
    """Acceptance: Spearman at least 0.9 on trained models; the attributions add up to the true difference."""
    subject = pl.load(name)
    those = passes(subject, inputs, count=24, length=48)
    by_gradient = rank(those, quiet)
    by_lending = rank_by_intervention(LendingStudy(those, xr.DataArray(), None, "test", quiet))
    assert by_gradient.truth == pytest.approx(by_lending.truth, rel=1e-3)
    assert abs(by_gradient.error) < 0.1
    assert spearmanr(by_gradient.heads.ravel(), by_lending.heads.ravel()).statistic >= 0.9


def test_layers_that_are_computed_again_give_the_same_gradients() -> None:
    subject = Subject.of(tiny("gemma2"), name="tiny")
    those = passes(subject, count=4)
    share = torch.full((2, 3, 3), 0.5)
    totals = those.totals(share, quiet)
    g = np.random.default_rng(0).normal(size=totals.shape) * np.isfinite(totals)
    kept, again = (derivatives(those, share, g, quiet, keep_graph=keep) for keep in (True, False))
    assert np.array_equal(again, kept), "to the bit: free memory decides which of the two is used"
    assert float(np.abs(kept).max()) > 0.1
    assert not any("forward" in vars(layer) for layer in decoder_layers(subject.model)), "layers are restored"


def test_totals_that_are_computed_again_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory is planned for the graph of one layer, and a total that is alive keeps the graph of its layer."""
    those, totals_of_pass, alive = passes(Subject.of(tiny("llama"), name="tiny"), count=1), list[Any](), list[int]()

    def watched(call: Any, out: torch.Tensor, plan: Any) -> torch.Tensor:
        total = total_of_copies(call, out, plan)
        alive.append(sum(reference() is not None for reference in totals_of_pass[3:]))
        totals_of_pass.append(weakref.ref(total))
        return total

    monkeypatch.setattr("posleak.analyses.circuit.ranking.total_of_copies", watched)
    share = torch.full((1, 3, 3), 0.5)
    totals = those.totals(share, quiet)
    derivatives(those, share, np.where(np.isfinite(totals), 1.0, 0.0), quiet, keep_graph=False)
    assert alive == [0] * 6, "three layers, each of them twice"


def test_a_forward_that_was_replaced_before_is_restored() -> None:
    """accelerate replaces `forward` of layers to move tensors between devices."""
    subject = Subject.of(tiny("llama"), name="tiny")
    layers = decoder_layers(subject.model)
    own = layers[1].forward
    calls = list[int]()

    def replaced(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    layers[1].forward = replaced
    rank(passes(subject, count=3), quiet, nodes=1, keep_graph=False)
    assert layers[1].forward is replaced
    assert "forward" not in vars(layers[0])
    assert calls


def test_low_memory_recomputes_layers_unless_the_model_computes_its_own_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used, forward = list[Any](), recomputing

    def counted(probe: Any) -> Any:
        used.append(probe)
        return forward(probe)

    monkeypatch.setattr("posleak.analyses.circuit.ranking.recomputing", counted)

    def graph(sizes: ModelSizes, tokens: int, item: int, *, whole: bool = True) -> int:
        return 2**60 if whole else 0

    monkeypatch.setattr(ModelSizes, "graph", graph)
    pl.circuit(counting(), length=N, prompts=8)
    assert used
    with raises(InputError, what="the circuit needs more memory", remedy="--rank intervene"):
        pl.circuit(Subject.of(tiny_model("gptj"), name="own"), length=N, prompts=8)


def test_passes_shrink_until_they_fit_into_the_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, used = counting(), set[int]()
    totals = LendingPasses.totals

    def counted(those: LendingPasses, *args: Any) -> Any:
        used.add(those.tokens)
        return totals(those, *args)

    monkeypatch.setattr(LendingPasses, "totals", counted)
    whole = pl.circuit(subject, length=N, prompts=16)

    def plan(*args: Any, tokens: int, **kwargs: Any) -> MemoryPlan:
        return MemoryPlan(tokens * 10**6, 0, 0)

    monkeypatch.setattr("posleak.analyses.circuit.circuit.circuit_plan", plan)
    less = pl.circuit(subject, length=N, prompts=16, max_memory="2GB")
    assert used == {TOKENS_AT_ONCE, 1024}
    for one, other in zip(whole.writing.removed, less.writing.removed, strict=True):
        assert float(one.leading.removed.value) == pytest.approx(float(other.leading.removed.value), abs=1e-3)


def test_weights_of_the_model_need_gradients_again_afterwards() -> None:
    model = tiny("llama").requires_grad_(True)
    subject = Subject.of(model, name="tiny")
    rank(passes(subject, count=3), quiet, nodes=1)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_a_model_without_gradients_is_told_to_intervene() -> None:
    model: Any = tiny("llama")
    for layer in model.model.layers:
        layer.self_attn.o_proj.forward = torch.no_grad()(layer.self_attn.o_proj.forward)
    with raises(UnsupportedError, where="packed", what="gradients", remedy="--rank intervene"):
        rank(passes(Subject.of(model, name="packed"), count=3), quiet, nodes=1)


def test_the_power_of_totals_is_that_of_their_products() -> None:
    what = study(Subject.of(tiny("mistral"), name="tiny"), count=6)
    what.measure([NO_HEAD], "none")
    totals = what.passes.totals(what.passes.shares_of([NO_HEAD]), quiet)[:, 0]
    assert power(totals, weights(totals, what.weight.values)) == pytest.approx(float(what.power(NO_HEAD).value))


def test_a_ranking_orders_heads_that_exist() -> None:
    ranking = Ranking("gradients", np.array([[0.1, 0.5], [0.3, np.nan]]), 1.0, 4, 5)
    assert ranking.order == [(0, 1), (1, 0), (0, 0)]
    other = Ranking("gradients", np.array([[0.4, 0.5], [0.1, np.nan]]), 1.0, 4, 5)
    compared = ranking.compared(other, (1, 2))
    assert compared.overlap == {1: 1.0, 2: 0.5}
    assert compared.correlation == pytest.approx(spearmanr([0.1, 0.5, 0.3], [0.4, 0.5, 0.1]).statistic)
    assert (compared.sum, compared.error) == pytest.approx((0.9, -0.1))
    assert np.isnan(Ranking("gradients", np.zeros((2, 1)), 0.0, 4, 5).error)


@pytest.mark.parametrize("apart", [False, True])
def test_passes_have_as_many_tokens_as_are_planned(apart: bool) -> None:
    """Against the ids that the model reads, and the plan of the memory."""
    for length, nodes in ((N, 5), (512, 5), (1100, 62)):
        subject = Subject.of(tiny("llama"), name="tiny")
        those = dataclasses.replace(passes(subject, length=length), apart=apart)
        copies, own = (
            copies_at_once(length, TOKENS_AT_ONCE, apart=apart),
            tokens_after_donor(length, nodes + 2, apart=apart),
        )
        assert tokens_after_donor(length, copies, apart=apart) <= max(
            TOKENS_AT_ONCE, tokens_after_donor(length, 1, apart=apart)
        )
        most = 0
        for count, at_once in ((copies, TOKENS_AT_ONCE), (nodes + 2, TOKENS_AT_ONCE), (nodes, TOKENS_WITH_GRAPH)):
            edit = LendByHead(torch.zeros(count, 3, 3), apart)
            one = tokens_after_donor(length, count, apart=apart)
            for batch, ids in those.batches_after_donor(edit, at_once):
                arranged, _ = edit.arrange(ids)
                assert arranged.numel() == len(batch) * one <= max(at_once, one)
                most = max(most, arranged.numel())
        plan = circuit_plan(subject, those.plan, 12, nodes, tokens=TOKENS_AT_ONCE, apart=apart, keep_graph=False)
        assert plan.activations >= ModelSizes.of(subject).forward(max(most, own), 4)
