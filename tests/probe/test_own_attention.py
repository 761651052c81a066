"""Families that compute their attention themselves: seen, edited and measured like others, or refused with a reason."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from transformers import PreTrainedModel

import posleak as pl
from posleak.analyses.doctor.doctor import doctor
from posleak.edits import parse_edits
from posleak.errors import CheckError, RunError, UnsupportedError
from posleak.models import Subject
from posleak.probe import Call, Edit, attach, backbone, calibrate, default_plan, read_placements
from posleak.probe.call import attend
from posleak.probe.interface import computes_own_attention
from posleak.probe.tracer import AttentionTracer, tracing_attention
from posleak.runs.memory import memory_plan
from posleak.runs.spec import MeasureSpec
from support.errors import assert_fields, mentions, raises
from support.families import VOCAB, tiny
from tools.traits import traits

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("falcon", {}),
    "falcon, ALiBi": ("falcon", {"alibi": True}),
    "falcon, ALiBi, eager": ("falcon", {"alibi": True, "attn_implementation": "eager"}),
    "falcon, eager": ("falcon", {"attn_implementation": "eager"}),
    "new falcon": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 1}),
    "new falcon, ALiBi": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 1, "alibi": True}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {}),
    "gptj": ("gptj", {"rotary_dim": 4}),
}
ALIBI = [name for name in MODELS if "ALiBi" in name or name in ("bloom", "mpt")]
LAWS = ("L1", "L2", "L4", "L5", "L7", "L8 batch", "L8 padding", "L9", "L10")


def own_attention_model(name: str, **more: Any) -> PreTrainedModel:
    family, own = MODELS[name]
    return tiny(family, **{**own, **more})


def tokens(prompts: int = 2, length: int = 48) -> Tensor:
    return torch.randint(3, VOCAB, (prompts, length), generator=torch.Generator().manual_seed(0))


class Kept:
    """Every call, and what attention returned."""

    def __init__(self) -> None:
        self.calls, self.outs = list[Call](), list[Tensor]()

    def observe(self, call: Call, out: Tensor) -> None:
        self.calls.append(call)
        self.outs.append(out)


def states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        output: Tensor = backbone(model)(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)[0]
    return output


# Measured like all others


@pytest.mark.parametrize("name", MODELS)
def test_calibration_and_all_laws_hold(name: str) -> None:
    model = own_attention_model(name)
    assert computes_own_attention(model)
    diagnosis = doctor(Subject.of(model, name=name), length=48, prompts=3, short=True)
    assert [check.id for check in diagnosis.checks if not check.ok] == []
    assert all(any(check.id.startswith(law) for check in diagnosis.checks) for law in LAWS)
    assert diagnosis.calibration.layers == 3
    assert len(set(diagnosis.calibration.modules)) == 3
    assert all(name.rsplit(".")[-1] in ("attn", "self_attention") for name in diagnosis.calibration.modules)
    assert diagnosis.calibration.unmeasured == ()


@pytest.mark.parametrize("name", ALIBI)
def test_alibi_is_known_by_its_bias_and_moves_with_the_key(name: str) -> None:
    subject = Subject.of(own_attention_model(name), name=name)
    summary = traits(subject, calibrate(subject.model, tokens()), 48, 5)
    assert summary.positions == "ALiBi"
    assert summary.moved == "yes"
    assert "bias" not in " ".join(summary.special)


def test_rotary_families_are_known_too() -> None:
    subject = Subject.of(own_attention_model("gptj"), name="gptj")
    assert traits(subject, calibrate(subject.model, tokens()), 48, 5).positions == "rotary"


def test_bias_that_is_not_linear_is_not_called_alibi() -> None:
    """One head's slope bent at one key."""
    model = own_attention_model("bloom")
    transformer: Any = backbone(model)
    straight = transformer.build_alibi_tensor

    def bent(*args: Any, **more: Any) -> Tensor:
        alibi: Tensor = straight(*args, **more).clone()
        alibi[0, 0, 20:21] += 0.5
        return alibi

    transformer.build_alibi_tensor = bent
    summary = traits(Subject.of(model), calibrate(model, tokens()), 48, 5)
    assert summary.positions == "none (NoPE)"
    assert summary.special == ("bias added to logits",)


def test_a_row_of_blooms_logits_is_what_its_weights_give() -> None:
    """s_ij = q_i·k_j / √E + m_h j with m_h = 2^(−8(h+1)/H), from the weights alone."""
    H, E, row = 4, 8, 29
    model = own_attention_model("bloom", hidden_size=H * E, num_attention_heads=H)
    ids, seen = tokens(), Kept()
    with attach(model, [seen]) as probe:
        probe.forward(ids)
    weights = model.state_dict()

    def layer_norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    x = layer_norm(weights["transformer.word_embeddings.weight"][ids], "transformer.word_embeddings_layernorm")
    x = layer_norm(x, "transformer.h.0.input_layernorm")
    name = "transformer.h.0.self_attention.query_key_value"
    fused = (x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]).view(2, 48, H, 3, E)
    q, k = fused[:, row, :, 0].double(), fused[:, :, :, 1].double()
    slope = torch.tensor([2.0 ** (-8 * (h + 1) / H) for h in range(H)]).double()
    expected = torch.einsum("bhe,bjhe->bhj", q, k) / math.sqrt(E) + slope[:, None] * torch.arange(48)
    logits = seen.calls[0].logits(torch.tensor([row]))[:, :, 0]
    assert torch.allclose(logits.double(), expected, atol=1e-4)
    bias = seen.calls[0].bias
    assert bias is not None
    assert torch.equal(bias[0, :, row, 1], slope.float())


def test_a_whole_measurement_of_bloom() -> None:
    subject = Subject.of(tiny("bloom"), name="bloom")
    run = pl.measure(subject, length=64, prompts=4, seed=1)
    assert run.record.calibration.ok
    assert run.record.calibration.layers == 3
    assert run.remainder < 1e-9
    assert run.record.motion.layers == ("no rotation",) * 3
    cut = pl.measure(subject, length=64, prompts=4, seed=1, edits=["sink=cut"])
    assert float(run.data["attention_0"].min()) > 0
    assert float(cut.data["attention_0"].max()) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_float32_of_a_narrower_model(dtype: torch.dtype) -> None:
    """GPT-J multiplies queries and keys in float32 and values in its own dtype."""
    model = own_attention_model("gptj", dtype=dtype, scale=1.0)
    seen = Kept()
    with attach(model, [seen]) as probe:
        assert probe.forward(tokens())[0].dtype == dtype
    assert (seen.calls[0].query.dtype, seen.calls[0].value.dtype) == (torch.float32, dtype)
    assert calibrate(model, tokens()).ok
    placements = read_placements(model, tokens(), default_plan(48))
    assert {place.moves for place in placements} == {"rotation"}


# Edits act


@pytest.mark.parametrize("name", ["falcon", "falcon, ALiBi, eager", "bloom", "mpt", "gptj"])
def test_a_cut_sink_is_really_cut(name: str) -> None:
    """What goes on into the model is the softmax over the other keys, worked out from the first call's logits."""
    model, ids = own_attention_model(name), tokens()
    plain, cut = Kept(), Kept()
    with attach(model, [plain]) as probe:
        before = probe.forward(ids)[0]
    with attach(model, [cut], parse_edits(["sink=cut"])) as probe:
        after = probe.forward(ids)[0]
    call = plain.calls[0]
    rows = torch.arange(48)
    s = call.logits(rows).masked_fill(~call.visibility.rows(rows), -torch.inf)
    s[:, :, 1:, 0] = -torch.inf
    value = call.value.repeat_interleave(call.heads // call.value.shape[1], dim=1)
    assert torch.allclose(cut.outs[0], s.softmax(-1) @ value, atol=1e-5)
    assert torch.allclose(after[:, 0], before[:, 0], atol=1e-5)
    assert float((after[:, 1:] - before[:, 1:]).abs().max()) > 1e-2


class ZeroQueries(Edit):
    """Every logit becomes 0: each query weighs all that it sees alike."""

    def edit(self, call: Call) -> Call:
        return replace(call, query=torch.zeros_like(call.query), bias=None)


def test_zero_queries_are_a_model_without_query_weights() -> None:
    model, ids = own_attention_model("gptj"), tokens()
    with attach(model, edits=[ZeroQueries()]) as probe:
        output = probe.forward(ids)[0]
    without = copy.deepcopy(model)
    for name, parameter in without.named_parameters():
        if "q_proj" in name:
            parameter.zero_()
    assert torch.allclose(output, states(without, ids), atol=1e-4)
    assert not torch.allclose(output, states(model, ids), atol=1e-2)


# Nothing is left behind


def untouched(model: PreTrainedModel) -> bool:
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    own = [name for module in model.modules() for name in vars(module) if name == "forward"]
    modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, AttentionTracer)]
    return not any(hooks) and not own and not modes


@pytest.mark.parametrize("name", ["falcon", "bloom"])
def test_everything_is_restored(name: str) -> None:
    model, ids = own_attention_model(name), tokens()
    before, implementation = states(model, ids), model.config._attn_implementation
    with attach(model) as probe:
        probe.forward(ids)
    doctor(Subject.of(model), length=48, prompts=2, short=True)
    assert untouched(model)
    assert model.config._attn_implementation == implementation
    assert torch.equal(states(model, ids), before)


def test_everything_is_restored_after_an_error() -> None:
    class Fails:
        def observe(self, call: Call, out: Tensor) -> None:
            raise ValueError("no")

    model, ids = own_attention_model("bloom"), tokens()
    before = states(model, ids)
    with pytest.raises(ValueError, match="no"), attach(model, [Fails()]) as probe:
        probe.forward(ids)
    assert untouched(model)
    assert torch.equal(states(model, ids), before)


def test_a_forward_of_its_own_is_given_back() -> None:
    """As libraries that move weights between devices put one on a module."""
    model = own_attention_model("bloom")
    inner: Any = backbone(model)
    inner.forward = replaced = inner.forward
    with attach(model) as probe:
        probe.forward(tokens())
        assert probe.calls == 3
    assert inner.forward is replaced


def test_passes_are_traced_in_the_thread_that_runs_them() -> None:
    model, failed = own_attention_model("bloom"), list[RunError]()

    def elsewhere(work: Callable[[], Any]) -> None:
        def run() -> None:
            try:
                work()
            except RunError as error:
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    with attach(model) as probe:
        elsewhere(lambda: states(model, tokens()))
        assert_fields(failed.pop(), what="another thread")
        elsewhere(lambda: probe.forward(tokens()))
        assert not failed
        assert probe.calls == 3


# What fits the pattern, and what does not


B, H, T, E = 2, 3, 7, 5
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
LOWEST = torch.finfo(torch.float32).min
MASK = torch.zeros(T, T).masked_fill(~CAUSAL, LOWEST)[None, None]
SLOPE = torch.tensor([0.5, 0.25, 0.1])[:, None, None] * torch.arange(T)
Written = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attention(torch.nn.Module):
    def __init__(self, written: Written) -> None:
        super().__init__()
        self.written = written

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.written(q, k, v)


class Body(torch.nn.Module):
    """A model's body that reads ids and has one attention, written as the case says."""

    def __init__(self, written: Written) -> None:
        super().__init__()
        self.attention = Attention(written)

    def forward(self, ids: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        q, k, v = (torch.randn(B, H, T, E, generator=generator) for _ in range(3))
        output: Tensor = self.attention(q, k, v)
        return output


def traced_attention(written: Written) -> tuple[Tensor, Tensor, Call]:
    """Return the output without and with the tracer, and the traced call."""
    calls: list[Call] = []
    inner = Body(written)

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, *, scaling: Any, **more: Any) -> Any:
        assert module is inner.attention
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        calls.append(Call(0, module, query, key, value, mask, scaling, bias=more["position_bias"]))
        return attend(calls[-1]).transpose(1, 2), None

    ids = torch.zeros(B, T, dtype=torch.long)
    alone = inner(ids)
    with tracing_attention(tiny("bloom"), inner, attention):
        traced = inner(ids)
    (call,) = calls
    return alone, traced, call


def folded(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.transpose(-1, -2)
    s /= math.sqrt(E)
    s.masked_fill_(~CAUSAL, LOWEST)
    return F.softmax(s, dim=-1) @ v


def clipped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = torch.bmm(folded(q), folded(k).transpose(1, 2)).view(B, H, T, T) + MASK
    return torch.bmm(folded(torch.max(s, torch.tensor(LOWEST)).softmax(-1)), folded(v)).view(B, H, T, E)


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    alibi = SLOPE[:, :1].repeat(B, 1, 1)
    s = alibi.baddbmm(batch1=folded(q), batch2=folded(k).transpose(1, 2), beta=1.0, alpha=0.3)
    weights = F.dropout(F.softmax(s.view(B, H, T, T) + MASK, dim=-1, dtype=torch.float32), 0.1, training=False)
    return torch.bmm(weights.view(B * H, T, T), folded(v)).view(B, H, T, E)


FITS: dict[str, tuple[Written, float, bool]] = {
    "scaled after": (lambda q, k, v: (q @ k.mT * 0.3 + MASK).softmax(-1) @ v, 0.3, False),
    "scaled before": (lambda q, k, v: ((q * 0.3) @ k.mT + MASK).softmax(-1) @ v, 1.0, False),
    "mask, then scaled": (lambda q, k, v: ((q @ k.mT + MASK) / 4).softmax(-1) @ v, 0.25, False),
    "bias, then scaled": (lambda q, k, v: ((q @ k.mT + SLOPE[:, :1]) * 0.3 + MASK).softmax(-1) @ v, 0.3, True),
    "in place": (in_place, E**-0.5, False),
    "where": (lambda q, k, v: torch.where(CAUSAL, q @ k.mT, torch.tensor(LOWEST)).softmax(-1) @ v, 1.0, False),
    "multiplied with a mask": (
        lambda q, k, v: ((q @ k.mT) * CAUSAL.float() + -1e4 * (1 - CAUSAL.float())).softmax(-1) @ v, 1.0, False),
    "weights hidden again": (
        lambda q, k, v: (q @ k.mT + MASK).softmax(-1).masked_fill(~CAUSAL, 0.0) @ v, 1.0, False),
    "folded": (clipped, 1.0, False),
    "biased product": (biased, 0.3, True),
    "fused, causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), E**-0.5, False),
    "fused, boolean": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=CAUSAL, scale=0.3), 0.3, False),
    "fused, biased": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK + SLOPE[:, :1]), E**-0.5, True),
    "one key head": (lambda q, k, v: (q @ k[:, :1].mT + MASK).softmax(-1) @ v[:, :1], 1.0, False),
}  # fmt: skip


@pytest.mark.parametrize("case", FITS)
def test_traced_attention_computes_the_same_output(case: str) -> None:
    written, scaling, has_bias = FITS[case]
    alone, traced, call = traced_attention(written)
    assert torch.allclose(traced, alone, atol=1e-5)
    assert call.scaling == pytest.approx(scaling)
    assert (call.bias is not None) == has_bias
    assert torch.equal(call.visibility.rows(torch.arange(T))[0, 0], CAUSAL)
    assert call.visibility.causal


REFUSED: dict[str, tuple[Written, tuple[str, ...]]] = {
    "soft-cap": (lambda q, k, v: (torch.tanh(q @ k.mT) + MASK).softmax(-1) @ v, ("'tanh'", "products")),
    "scaled by head": (lambda q, k, v: (q @ k.mT * torch.rand(H, 1, 1) + MASK).softmax(-1) @ v, ("'mul'", "products")),
    "clipped": (lambda q, k, v: ((q @ k.mT).clamp(-1, 1) + MASK).softmax(-1) @ v, ("'clamp'", "products")),
    "two products": (lambda q, k, v: (q @ k.mT + k @ q.mT + MASK).softmax(-1) @ v, ("'add of two products'",)),
    "gated weights": (lambda q, k, v: ((q @ k.mT + MASK).softmax(-1) * torch.rand(H, 1, 1)) @ v, ("'mul'", "weights")),
    "dropout": (lambda q, k, v: F.dropout((q @ k.mT + MASK).softmax(-1), 0.5, training=True) @ v, ("model.eval()",)),
    "along queries": (lambda q, k, v: (q @ k.mT + MASK).softmax(-2) @ v, ("softmax", "queries")),
    "no product": (lambda q, k, v: torch.rand(B, H, T, T).softmax(-1) @ v, ("softmax", "one product")),
    "einsum": (lambda q, k, v: torch.einsum("bhie,bhje->bhij", q, k).softmax(-1) @ v, ("softmax", "one product")),
    "sink logit": (
        lambda q, k, v: torch.cat([q @ k.mT + MASK, torch.ones(B, H, T, 1)], -1).softmax(-1)[..., :-1] @ v,
        ("softmax", "one product")),
    "weights unused": (lambda q, k, v: (q @ k.mT + MASK).softmax(-1), ("not multiplied", "values")),
    "no softmax": (lambda q, k, v: (q @ k.mT).masked_fill(~CAUSAL, 0.0) @ v, ("no attention",)),
    "hidden in part": (lambda q, k, v: ((q @ k.mT) * CAUSAL.float()).softmax(-1) @ v, ("hidden keys",)),
    "folded for ever": (
        lambda q, k, v: torch.bmm((folded(q) @ folded(k).mT + MASK[0]).softmax(-1), folded(v)), ("batch=1",)),
    "behind the watch": (
        lambda q, k, v: (lambda s: (s.detach().view(-1).mul_(2), s)[1])(q @ k.mT + MASK).softmax(-1) @ v,
        ("differ",)),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_the_reason(case: str) -> None:
    written, parts = REFUSED[case]
    with pytest.raises(UnsupportedError, match=mentions(*parts)):
        traced_attention(written)


def test_a_refusal_names_the_model_the_module_and_a_remedy() -> None:
    """Bloom with a soft-cap that its family does not have."""
    model = own_attention_model("bloom")
    attention: Any = backbone(model).h[1].self_attention  # type: ignore[index, union-attr]
    attention.attention_dropout = torch.nn.Tanh()
    with pytest.raises(UnsupportedError) as error:
        calibrate(model, tokens())
    said = str(error.value)
    assert "BloomForCausalLM, attention call 1 (BloomAttention)" in said
    assert "'tanh'" in said
    assert "cannot be measured" in said
    assert "posleak doctor" not in said
    assert untouched(model)


def test_a_model_that_replaces_its_modules_is_refused() -> None:
    """BigBird turns its sparse attention into a full one at the first short prompt, and keeps it for long ones."""
    sizes: dict[str, Any] = {"is_decoder": True, "hidden_size": 24, "num_attention_heads": 3, "block_size": 8}
    with raises(UnsupportedError, where="BigBirdForCausalLM", what="modules", got="BigBirdSelfAttention"):
        calibrate(tiny("big_bird", **sizes), tokens())
    full = tiny("big_bird", attention_type="original_full", **sizes)
    assert calibrate(full, tokens()).ok


def test_attention_that_sees_the_future_is_refused() -> None:
    model = tiny("xlm", emb_dim=30, n_heads=3, n_layers=2, n_words=VOCAB, causal=False)
    with raises(CheckError, where="calibration", what="later keys", expected="0", remedy="`posleak doctor`"):
        calibrate(model, tokens()).require("xlm")


# Memory


def test_plans_include_all_pairs_of_tokens() -> None:
    plans = [
        [memory_plan(Subject.of(tiny(f)), MeasureSpec(length=n, prompts=1, batch=1)).activations for n in (2048, 4096)]
        for f in ("bloom", "llama")
    ]
    assert 3.5 < plans[0][1] / plans[0][0] < 4
    assert 1.9 < plans[1][1] / plans[1][0] < 2.1
