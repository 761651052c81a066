"""The probe computes what the model computes, leaves no trace, and its checks can fail."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface

from posleak.errors import CheckError, InputError, UnsupportedError
from posleak.probe import Call, Edit, Plan, Visibility, attach, calibrate, default_plan, relative_difference
from posleak.probe.call import attend
from posleak.probe.visibility import visibility_mask
from support.errors import raises
from support.families import FAMILIES, VOCAB, WINDOW, tiny

N, B, PAD = 43, 3, 5


def tokens(batch: int = B, length: int = N) -> torch.Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(7))


def padded(ids: torch.Tensor) -> torch.Tensor:
    keep = torch.ones_like(ids)
    keep[0, :PAD] = 0
    return keep


@pytest.mark.parametrize("family", FAMILIES)
def test_parity_with_eager_attention(family: str) -> None:
    """Sharp logits, windows shorter than the text, left padding: to 1e-4 relative in float32."""
    sharp = 12.0 if family in ("gpt_oss", "mixtral") else 30.0  # sharper, and rounding changes which expert is chosen
    model, ids = tiny(family, scale=sharp), tokens()
    keep = padded(ids)
    model.set_attn_implementation("eager")
    expected = model(ids, attention_mask=keep, use_cache=False).logits
    with attach(model) as probe:
        logits = model(ids, attention_mask=keep, use_cache=False).logits
    assert probe.calls in (3, 6)
    assert relative_difference(logits[keep.bool()], expected[keep.bool()]) < 1e-4


@pytest.mark.parametrize(
    ("family", "broken"),
    [
        ("gemma2", {"softcap": None}),
        ("gpt_oss", {"s_aux": None}),
        ("granite", {"scaling": 1.0}),
        ("mistral", {"visibility": Visibility((B, 1, N, N), causal=True)}),
    ],
)
def test_parity_breaks_when_a_term_is_dropped(family: str, broken: dict[str, Any]) -> None:
    """The test above discriminates: without soft-cap, sink logits, scaling or window, the output is another."""

    class Break(Edit):
        def edit(self, call: Call) -> Call:
            return replace(call, **broken)

    model, ids = tiny(family), tokens()
    expected = model.base_model(ids, use_cache=False)[0]
    with attach(model, edits=[Break()]) as probe:
        assert relative_difference(probe.forward(ids)[0], expected) > 1e-2


def test_detaching_leaves_no_trace_also_after_an_exception() -> None:
    model, ids = tiny("gemma3_text"), tokens()
    registered = set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)
    before, hooks = model.base_model(ids, use_cache=False)[0], len(model.base_model._forward_pre_hooks)

    def fail() -> None:
        with attach(model) as probe:
            probe.forward(ids)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert model.config._attn_implementation == "sdpa"
    assert (set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)) == registered
    assert len(model.base_model._forward_pre_hooks) == hooks
    assert torch.equal(model.base_model(ids, use_cache=False)[0], before)


def test_two_models_can_be_attached_at_once() -> None:
    first, second, ids = tiny("llama"), tiny("mistral"), tokens()
    expected = first.base_model(ids, use_cache=False)[0]
    with attach(first) as outer, attach(second) as inner:
        inner.forward(ids)
        assert torch.equal(outer.forward(ids)[0], expected)


def test_no_n_by_n_tensor_is_made() -> None:
    """The largest tensor any operation returns grows with N·block, not with N²."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and not isinstance(result, Visibility):
                self.size = max(self.size, result.untyped_storage().nbytes())
            return result

    length = 3000
    for family in ("mistral", "gemma2"):
        model, ids = tiny(family, max_position_embeddings=4096), tokens(1, length)
        with attach(model) as probe, Largest() as largest:
            probe.forward(ids)
        assert 0 < largest.size < length * length, family


def test_visibility_is_lazy_and_equals_the_dense_mask() -> None:
    from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

    rule = sliding_window_causal_mask_function(WINDOW)
    keep = padded(tokens()).bool()
    arguments: dict[str, Any] = {"mask_function": rule, "attention_mask": keep, "local_size": WINDOW}
    lazy = visibility_mask(B, N, N, **arguments)
    dense = sdpa_mask(B, N, N, **arguments)
    assert dense is not None
    assert torch.equal(lazy.dense(), dense)
    assert torch.equal(lazy[:, :, 3:7], dense[:, :, 3:7])
    assert torch.equal(lazy.rows(torch.tensor([11, 31])), dense[:, :, [11, 31]])
    assert not torch.equal(visibility_mask(B, N, N).dense(), dense)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_visibility_moves_between_devices_as_a_rule(mode: Any) -> None:
    """Models that are spread over devices move their mask along; it must not become an N×N tensor on the way."""
    lazy = visibility_mask(B, N, N, attention_mask=padded(tokens()).bool())
    with mode():
        for moved in (lazy.to("meta"), lazy.to(device="meta", non_blocking=True)):
            assert isinstance(moved, Visibility)
            assert moved.device.type == "meta"
            assert moved.padding is not None
            assert moved.padding.device.type == "meta"
        assert isinstance(lazy.to("cpu"), Visibility)
        assert not isinstance(lazy.to(torch.float32), Visibility)


def test_the_blocked_path_equals_the_fused_one() -> None:
    q, k, v = torch.randn(2, 6, 300, 7), torch.randn(2, 3, 300, 7), torch.randn(2, 3, 300, 5)
    call = Call(0, torch.nn.Identity(), q, k, v, Visibility((2, 1, 300, 300), causal=True), 0.5)
    blocked = replace(call, visibility=Visibility((2, 1, 300, 300), causal=False))
    assert torch.allclose(attend(call), attend(blocked), atol=1e-5)
    explicit = replace(call, softcap=1e6)
    assert torch.allclose(attend(call), attend(explicit), atol=1e-4)


# Checks that can fail


def test_a_missing_mask_function_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AttentionMaskInterface, "register", classmethod(lambda cls, key, value: None))
    model = tiny("llama")
    with attach(model) as probe, raises(UnsupportedError, where="attention call 0", what="causal", got="no mask"):
        probe.forward(tokens())


def test_a_skipped_layer_is_caught_and_named() -> None:
    model = tiny("llama")
    body: Any = model.base_model
    body.layers[1].self_attn.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    with raises(CheckError, where="calibration", got=("2 calls", "model.layers.1.self_attn")):
        calibrate(model, tokens())


def test_a_layer_with_its_own_copy_of_the_config_is_reached() -> None:
    model = tiny("llama")
    layer: Any = model.get_submodule("model.layers.1.self_attn")
    layer.config = copy.deepcopy(model.config)
    assert calibrate(model, tokens()).layers == 3
    assert layer.config._attn_implementation == model.config._attn_implementation


def test_a_kernel_that_sees_the_future_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def bidirectional(call: Call) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(call.query, call.key, call.value, enable_gqa=True)

    for home in ("posleak.probe.attachment.attend", "posleak.probe.calibration.attend"):
        monkeypatch.setattr(home, bidirectional)
    calibration = calibrate(tiny("llama"), tokens())
    assert calibration.future > 0
    with raises(CheckError, where="calibration", what="later keys", expected="0"):
        calibration.require("llama")


def test_rows_that_are_not_the_kernels_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong head order: the rows are right one by one, and belong to other heads."""
    logits = Call.logits
    monkeypatch.setattr(Call, "logits", lambda *args: logits(*args).flip(1))
    calibration = calibrate(tiny("llama"), tokens())
    assert calibration.parity < 1e-4
    with raises(CheckError, where="calibration", what="denominators", expected="1e-05"):
        calibration.require("llama")


def test_an_unknown_argument_is_refused_by_name() -> None:
    model = tiny("llama")
    with (
        attach(model) as probe,
        raises(UnsupportedError, where="attention call 0", what="colour"),
    ):
        probe.forward(tokens(), colour=torch.zeros(1))


def test_dropout_is_refused_where_it_stays_on_in_evaluation_mode() -> None:
    model = tiny("llama", attention_dropout=0.5).train()
    with attach(model) as probe:
        probe.forward(tokens())
        model.train()
        with raises(UnsupportedError, what="dropout", got=0.5, remedy="model.eval()"):
            probe.forward(tokens())
    assert model.training


# The plan


def test_the_default_plan_is_the_one_in_the_definitions() -> None:
    plan = default_plan(256)
    assert plan.origin == 4
    assert plan.queries[:6] == (5, 7, 9, 11, 13, 15)
    assert plan.queries[6] == 16
    assert plan.queries[-1] == 191
    assert len(plan.queries) == 26
    assert plan.references[0] == 192
    assert plan.references[-1] == 255
    assert len(plan.references) == 15
    assert plan.offsets == (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)


def test_queries_begin_after_the_origin_however_wide_it_is() -> None:
    assert default_plan(256, origin=1).queries[:8] == (2, 4, 6, 8, 10, 12, 14, 16)
    wide = default_plan(256, origin=40)
    assert wide.queries[0] == 41
    assert wide.references == default_plan(256).references


@pytest.mark.parametrize("origin", [0, -1, 65])
def test_an_origin_that_leaves_no_room_is_refused(origin: int) -> None:
    with raises(InputError, where="--origin", got=origin, expected="1 to 64"):
        default_plan(256, origin=origin)


@pytest.mark.parametrize(
    "rows", [{"queries": (4, 9)}, {"queries": (9, 9)}, {"references": (48, 64)}, {"references": (40,)}, {"origin": 0}]
)
def test_rows_that_are_no_plan_are_refused(rows: dict[str, Any]) -> None:
    """In the origin, twice, past the end, a reference before a query, no origin at all."""
    good: dict[str, Any] = {"length": 64, "queries": (9, 47), "references": (48, 63), "offsets": (0, 1), "origin": 5}
    assert Plan(**good).rows == (9, 47, 48, 63)
    with raises(InputError, where="plan", got=f"origin {rows.get('origin', 5)}", expected=63):
        Plan(**{**good, **rows})


def test_a_denser_plan_holds_the_default_offsets() -> None:
    assert set(default_plan(256).offsets) < set(default_plan(256, density=2).offsets)


def test_a_short_prompt_is_refused_with_the_remedy() -> None:
    with raises(InputError, where="length", got=31, expected=32, remedy="--length 32"):
        default_plan(31)
