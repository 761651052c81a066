"""Output projections are found without names, heads add up to what their module writes, planted readers are found."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from posleak.analyses.origin.fingerprint import Projection, projections
from posleak.analyses.origin.reading import LayerReading, Reading, attention_to_origin, read
from posleak.probe import Call, Collector, Plan, Visibility, attach
from support.families import FAMILIES, VOCAB, tiny

KNOWN = {"gpt_neox": "attention.dense", "phi": "self_attn.dense"}
INDIRECT = {"diffllama": "a difference of two heads", "bitnet": "a norm before the projection"}
NORMED = {
    "gemma2": "post_attention_layernorm",
    "gemma3_text": "post_attention_layernorm",
    "olmo2": "post_attention_layernorm",
    "olmo3": "post_attention_layernorm",
    "exaone4": "post_attention_layernorm",
    "glm4": "post_self_attn_layernorm",
}


def tokens(batch: int = 3, length: int = 41) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in INDIRECT])
def test_the_output_projection_is_found(family: str) -> None:
    model = tiny(family)
    found = projections(model, tokens(2, 9))
    known = KNOWN.get(family, "self_attn.o_proj")
    assert [p.layer for p in found] == [0, 1, 2]
    for p in found:
        assert p.space == "output"
        assert p.name is not None
        assert p.name.endswith(f".{p.layer}.{known}")
        weight = model.get_submodule(p.name).weight
        gain = torch.ones(len(weight)) if p.gain is None else p.gain  # type: ignore[arg-type]
        expected = (weight.T * gain).view(p.heads, p.size, -1)  # type: ignore[operator]
        assert torch.allclose(p.weight(), expected, atol=1e-5)
        assert torch.allclose(p.gram.float(), expected @ expected.mT, atol=1e-4)


@pytest.mark.parametrize("family", INDIRECT)
def test_where_something_stands_in_between_values_are_measured(family: str) -> None:
    found = projections(tiny(family), tokens(2, 9))
    assert {p.space for p in found} == {"value"}
    assert torch.equal(found[0].weight()[0], torch.eye(found[0].size))
    assert {p.layer for p in found} == {0, 1, 2}


def test_a_transposed_projection_is_read_too() -> None:
    """GPT-2 keeps its matrices the other way round."""
    model = tiny("gpt2", n_embd=30, n_layer=3, n_head=3, n_positions=64, n_inner=41)
    p = projections(model, tokens(2, 9))[1]
    assert p.name == "transformer.h.1.attn.c_proj"
    assert torch.allclose(p.weight().flatten(0, 1), model.get_submodule(p.name).weight, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gain_after_the_projection_is_found(family: str) -> None:
    model = tiny(family)
    scale = torch.rand(model.config.hidden_size) + 0.5
    if family in NORMED:
        norm = model.get_submodule(f"model.layers.1.{NORMED[family]}")
        norm.weight.copy_(scale)  # type: ignore[operator]
    p = projections(model, tokens(2, 9))[1]
    if family not in NORMED:
        assert p.gain is None
        return
    expected = scale + 1 if family.startswith("gemma") else scale
    assert p.gain is not None
    ratio = p.gain / expected
    assert torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-3)


class Outputs:
    """Keeps what attention returned, and v_0."""

    def __init__(self) -> None:
        self.out, self.calls = list[torch.Tensor](), list[Call]()

    def observe(self, call: Call, out: torch.Tensor) -> None:
        self.out.append(out)
        self.calls.append(call)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "starcoder2", "cohere2", "gpt_oss"])
def test_the_writes_of_all_heads_add_up_to_the_projections_output(family: str) -> None:
    model, look = tiny(family), Outputs()
    found = projections(model, tokens(2, 9))
    p = found[1]
    assert p.module is not None
    written = list[torch.Tensor]()
    hook = p.module.register_forward_hook(lambda module, args, output: written.append(output))
    with attach(model, [look]) as probe:
        probe.forward(tokens())
    hook.remove()
    bias = getattr(p.module, "bias", None)
    expected = written[0] if bias is None else written[0] - bias
    heads = torch.einsum("bhte,hew->bhtw", look.out[1], p.weight())
    assert torch.allclose(heads.sum(1), expected, atol=1e-4)
    assert float(torch.einsum("bhte,hew->bhtw", look.out[1], p.weight().flip(0)).sum(1).sub(expected).abs().max()) > 0.1


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral"])
def test_reading_equals_its_definition_on_full_matrices(family: str) -> None:
    """Everything again from the whole attention matrix and from vectors of the stream's width."""
    model, ids = tiny(family), tokens(4, 64)
    plan = _plan(64)
    found, look = projections(model, ids[:, :9]), Outputs()
    reader = Collector(partial(read, plan=plan, projections=found))
    with attach(model, [reader, look]) as probe:
        probe.forward(ids)
    layers = reader.layers
    rows, late = torch.tensor(plan.rows), slice(len(plan.queries), None)
    for layer, call, out, p in zip(layers, look.calls, look.out, found, strict=True):
        s = call.logits(slice(None)).masked_fill(~call.visibility.dense(), -torch.inf)
        if call.s_aux is not None:
            s = torch.cat([s, call.s_aux.view(1, -1, 1, 1).expand(*s.shape[:3], 1)], dim=-1)
        a = s.softmax(-1)[:, :, rows, 0].double()
        w = p.weight().double()
        wo = torch.einsum("bhte,hew->bhtw", out[:, :, rows].double(), w)
        wv = torch.einsum("bhe,hew->bhw", call.value[:, :, 0].repeat_interleave(3, 1).double(), w)
        assert torch.allclose(layer.attention, a, atol=1e-6)
        expected = (a * wv.norm(dim=-1)[..., None] / wo.norm(dim=-1))[..., late].mean(-1)
        assert torch.allclose(layer.written, expected, rtol=1e-4)
        around = wo - wo.mean(2, keepdim=True)
        line = torch.einsum("bhpw,bhw->bhp", around, wv / wv.norm(dim=-1, keepdim=True))
        assert torch.allclose(layer.along, line.square().sum(-1) / around.square().sum((-1, -2)), rtol=1e-4)


def test_a_planted_reader_is_found_and_its_position_signal_told_from_content() -> None:
    """Three heads: one reads position 0 with a share that falls with i, one with a share that is noise, one not."""
    plan, T, B = _plan(64), 64, 12
    i = torch.arange(T).float()
    shares = torch.stack([(0.9 - 0.4 * i / T).expand(B, T), 0.7 + 0.1 * torch.randn(B, T), torch.full((B, T), 0.01)], 1)
    shares = shares + 1e-6 * torch.randn(B, 1, 1)  # prompts that do not differ at all have no intervals
    batch = [_layer(shares[b : b + 1], plan) for b in range(B)]
    p = Projection(0, 0, 3, 4, None, None, None)
    reading = Reading.from_batches(batch, plan, [p])
    assert reading.is_reader.tolist() == [[True, True, False]]
    (count,) = (call.readers for call in reading.calls)
    assert count.value == count.low == count.high == 2
    first, second = reading.heads
    late = torch.tensor(plan.references)
    assert reading.at_0[0, 0] == pytest.approx(float(shares[0, 0, late].mean()), abs=1e-5)
    assert first.positional.value == pytest.approx(1, abs=1e-4)
    assert abs(second.positional.value) < 0.15
    assert first.along.value == pytest.approx(1, abs=1e-3)
    rows = torch.tensor(plan.rows)
    assert first.spread.value == pytest.approx(float(shares[0, 0, rows].std(correction=0)), rel=1e-4)
    assert reading.space == "value"
    assert len(reading.as_dict()["heads"]) == 2


def test_position_zero_out_of_sight_is_not_read() -> None:
    call = _call(torch.full((1, 1, 64), 0.9))
    hidden = Call(
        0, call.module, call.query, call.key, call.value,
        call.visibility.with_rule("near", lambda b, h, q, k: (k <= q) & (q - k < 5)), 1.0,
    )  # fmt: skip
    assert attention_to_origin(hidden, torch.tensor([3, 4, 5, 60])).flatten().round(decimals=3).tolist()[2:] == [0, 0]


def _plan(length: int) -> Plan:
    references = tuple(range(3 * length // 4, length - 1, 2))
    return Plan(length, tuple(range(2, 3 * length // 4, 3)), references, (0, 1, 2), origin=1)


def _call(shares: torch.Tensor) -> Call:
    """Heads [B, H, T] that give position 0 this share, and the rest evenly to the body; values say which key it was."""
    B, H, T = shares.shape
    body = torch.arange(T).clamp(min=1)
    logit = (shares * body / (1 - shares)).log()  # e^s_0 / (e^s_0 + i) = share
    query = torch.zeros(B, H, T, 4)
    query[..., 0] = logit
    key, value = torch.zeros(B, H, T, 4), torch.zeros(B, H, T, 4)
    key[:, :, 0, 0], value[:, :, 0, 0] = 1, 1
    return Call(0, torch.nn.Identity(), query, key, value, Visibility((B, 1, T, T), causal=True), 1.0)


def _layer(shares: torch.Tensor, plan: Plan) -> list[LayerReading]:
    from posleak.probe.call import attend

    call = _call(shares)
    return [read(call, attend(call), plan=plan, projections=[Projection(0, 0, shares.shape[1], 4, None, None, None)])]
