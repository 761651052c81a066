"""Models with code of their own: their attention is found by watching it, whatever the classes are called."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

import posleak as pl
from posleak.analyses.doctor.doctor import Diagnosis, doctor
from posleak.analyses.doctor.laws import DoctorVerdict
from posleak.analyses.doctor.passes import RECURRENT, TABLE, first_entrance
from posleak.errors import UnsupportedError
from posleak.models import Subject
from posleak.models.hold import random_models
from posleak.probe import Call, attach, interface
from posleak.probe.interface import AttentionCalls, attention_calls, computes_own_attention
from support import mixer as custom
from support.errors import raises
from support.families import tiny
from support.mixer import OUTPUTS, TENSOR, MixerLM, mixer
from support.models_tiny import edit_config

OWN = ("causal", "grouped", "mask", "softmax", "multihead", "multihead weights")
INTERFACE = ("interface", "is_causal")
IDS = torch.randint(3, 101, (2, 48), generator=torch.Generator().manual_seed(0))


def diagnosed(model: MixerLM, **more: Any) -> Diagnosis:
    return doctor(Subject.of(model, name="mixer"), length=48, prompts=3, short=True, **more)


def require_sound(diagnosis: Diagnosis, *exceptions: str) -> None:
    """The model ignores its attention mask, so that padding changes it; all else holds."""
    failed = {check.id: check.cause for check in diagnosis.checks if not check.ok}
    assert set(failed) == {"L8 padding", *exceptions}
    assert all(failed.values())
    assert {"calls", "parity", "parity eager", "partition"} <= {check.id for check in diagnosis.checks}


def console(**names: Any) -> type[MixerLM]:
    """Return the model's class, defined where no source code can be read, as in a notebook or a REPL."""
    namespace: dict[str, Any] = {"__name__": "__console__", **names}
    exec(Path(custom.__file__).read_text(encoding="utf-8"), namespace)
    cls: type[MixerLM] = namespace["MixerLM"]
    return cls


# Found


@pytest.mark.parametrize("style", OWN)
def test_attention_in_a_function_is_traced(style: str) -> None:
    model = mixer(style)
    assert attention_calls(model) == AttentionCalls(interface=0, own=3)
    diagnosis = diagnosed(model)
    require_sound(diagnosis)
    assert diagnosis.calibration.layers == 3
    assert diagnosis.positions == ("none" if "multihead" in style else "rotary")


@pytest.mark.parametrize("style", INTERFACE)
def test_the_interface_is_used_if_the_model_uses_it(style: str) -> None:
    """With is_causal the eager function of the model, which knows no such argument, is not causal."""
    model = mixer(style)
    assert attention_calls(model) == AttentionCalls(interface=3, own=0)
    assert not computes_own_attention(model)
    require_sound(diagnosed(model), *(("parity eager",) if style == "is_causal" else ()))


def test_all_ways_of_writing_one_model_give_the_same_numbers() -> None:
    def shares(*style: str) -> Any:
        return pl.measure(Subject.of(mixer(*style)), length=48, prompts=4).data["mask"].values

    expected = shares("causal")
    assert np.isfinite(expected).any()
    for style in (["mask"], ["softmax"], ["interface"], ["is_causal"], ["softmax", "interface", "mask"]):
        assert np.allclose(shares(*style), expected, atol=1e-4, equal_nan=True)


def test_layers_of_both_kinds_are_all_measured() -> None:
    model = mixer("softmax", "interface", "causal")
    assert attention_calls(model) == AttentionCalls(interface=1, own=2)
    assert diagnosed(model).calibration.modules == tuple(f"blocks.{layer}" for layer in range(3))


def test_layers_of_both_kinds_are_refused_if_one_kind_cannot_be_traced() -> None:
    model = mixer("softmax", "interface", "causal")
    AttentionInterface.register("mine", custom.plain)
    try:
        model.config._attn_implementation_internal = "mine"
        with raises(UnsupportedError, where="MixerLM", what="'mine'", got=("2", "1"), remedy="attn_implementation"):
            diagnosed(model)
    finally:
        AttentionInterface._global_mapping.pop("mine")


@pytest.mark.parametrize("style", ["softmax", "interface"])
def test_classes_without_source_code(style: str) -> None:
    cls = console()
    model = cls(cls.config_class(style=(style,)))
    assert computes_own_attention(model) == (style == "softmax")
    require_sound(diagnosed(model))


@pytest.mark.parametrize("style", ["mask", "interface"])
def test_a_folder_with_code(style: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = mixer(style)
    model.save_pretrained(folder)
    shutil.copy(custom.__file__, folder / "mixer.py")
    edit_config(folder, auto_map={"AutoConfig": "mixer.MixerConfig", "AutoModelForCausalLM": "mixer.MixerLM"})
    subject = pl.load(folder, trust_remote_code=True)
    assert computes_own_attention(subject.model) == (style == "mask")
    assert doctor(subject, length=48, prompts=2, short=True).calibration.ok


def test_a_row_is_what_the_weights_give() -> None:
    """The first call's attention, computed from the weights without posleak."""
    model, kept = mixer("grouped"), list[Call]()

    class Keep:
        def observe(self, call: Call, out: Tensor) -> None:
            kept.append(call)

    with attach(model, [Keep()]) as probe:
        probe.forward(IDS)
    block: Any = model.blocks[0]
    n = block.norm(model.embed(IDS))
    q, k = (custom.rotated(part(n).unflatten(-1, (-1, 10)).transpose(1, 2)) for part in (block.q, block.k))
    expected = (q @ k.mT / 10**0.5)[:, :, 20]
    assert k.shape[1] == 1
    assert torch.allclose(kept[0].logits(torch.tensor([20]))[:, :, 0], expected, atol=1e-5)


# Rejected


@pytest.mark.parametrize("style", ["everything", "one ahead"])
@pytest.mark.parametrize("before", [(), ("interface",), ("causal", "causal")])
def test_a_layer_that_sees_the_future_is_rejected(style: str, before: tuple[str, ...]) -> None:
    model = mixer(*before, style)
    what = "not causal" if style == "everything" else "later keys"
    with raises(UnsupportedError, what=what, remedy="cannot be measured"):
        diagnosed(model)


def test_a_model_without_attention_is_named() -> None:
    with raises(UnsupportedError, where="MixerLM", what="no attention"):
        diagnosed(mixer("none"))


# Watching


def test_watching_leaves_nothing_behind_and_happens_once() -> None:
    model, passes = mixer("interface"), list[int]()
    model.register_forward_hook(lambda *_: passes.append(1))
    names = set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)
    before, expected, implementation = torch.get_rng_state(), model(IDS).logits, model.config._attn_implementation
    attention_calls(model)
    watched = len(passes)
    attention_calls(model)
    assert watched == len(passes) == 2
    assert (set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)) == names
    assert model.config._attn_implementation == implementation
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model(IDS).logits, expected)


def test_a_model_that_draws_numbers_is_remembered_and_gives_them_back() -> None:
    def draws(*_: Any) -> None:
        torch.rand(1)

    model = mixer("causal")
    model.blocks[0].register_forward_hook(draws)
    before = torch.get_rng_state()
    attention_calls(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert model in random_models


def test_a_model_that_knows_only_its_own_implementations_is_traced() -> None:
    def look_up(module: Any, _: Any) -> None:
        {"sdpa": 1, "eager": 2}[module.config._attn_implementation]

    model = mixer("causal")
    model.blocks[0].register_forward_pre_hook(look_up)
    assert attention_calls(model) == AttentionCalls()
    require_sound(diagnosed(model))


def test_a_model_that_cannot_be_run_says_so() -> None:
    model = mixer("causal")

    def fails(*_: Any) -> None:
        raise ValueError("no such device")

    model.blocks[1].register_forward_pre_hook(fails)
    with pytest.raises(ValueError, match="no such device"):
        attention_calls(model)
    assert model not in interface._watched


def test_whole_families_are_still_recognised() -> None:
    for family, own in {"llama": False, "gpt_oss": False, "diffllama": False, "bloom": True, "mpt": True}.items():
        assert computes_own_attention(tiny(family)) == own


# Outputs of any class


@pytest.mark.parametrize("output", OUTPUTS)
def test_outputs_of_any_class(output: str) -> None:
    subject = Subject.of(mixer(output=output), name="mixer")
    require_sound(doctor(subject, length=48, prompts=3, short=True))
    expected = pl.measure(Subject.of(mixer()), length=48, prompts=4, loss=True).data["loss"]
    assert torch.allclose(
        torch.tensor(pl.measure(subject, length=48, prompts=4, loss=True).data["loss"].values),
        torch.tensor(expected.values),
    )


def test_origin_and_circuit_need_no_hidden_states() -> None:
    subject = Subject.of(mixer(output=TENSOR), name="mixer")
    origin = pl.origin(subject, length=48)
    assert origin.closure.ok
    assert len(origin.closure.per_layer) == 4
    assert pl.circuit(subject, length=48, prompts=8).writing is not None


def test_origin_names_what_it_misses() -> None:
    class Blocks(torch.nn.Module):  # not a ModuleList
        def __init__(self, blocks: torch.nn.ModuleList) -> None:
            super().__init__()
            self.a, self.b, self.c = blocks

        def __iter__(self) -> Any:
            return iter((self.a, self.b, self.c))

    model: Any = mixer(output=TENSOR)
    model.blocks = Blocks(model.blocks)
    with raises(UnsupportedError, where="MixerLM", expected=("ModuleList", "hidden_states")):
        pl.origin(Subject.of(model), length=48)


# Causes are named


def shifted(module: Any, args: Any, out: Tensor) -> Tensor:
    return out + 0.5 * torch.nn.functional.pad(out, (0, 0, 1, 0))[:, :-1]


def placed(module: Any, args: Any, out: Tensor) -> Tensor:
    return out + torch.arange(out.shape[1])[:, None] * torch.linspace(0, 1, out.shape[2])


@pytest.mark.parametrize("where", ["blocks.0", "blocks.1.norm"])
@pytest.mark.parametrize(("hook", "kind"), [(shifted, RECURRENT), (placed, TABLE)])
def test_a_table_inside_a_module_is_no_recurrent_layer(where: str, hook: Any, kind: str) -> None:
    """Also if the module computes attention, whose learned sink logits would be another cause."""
    model = mixer()
    model.get_submodule(where).register_forward_hook(hook)
    entrance = first_entrance(model, 5)
    assert entrance is not None
    assert (entrance.kind, entrance.module) == (kind, where)


def test_trace_does_not_call_a_change_with_length_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    mix = custom.mix

    def scaled(module: Any, q: Tensor, *others: Any) -> Tensor:
        return mix(module, q * float(np.log(q.shape[2])), *others)

    monkeypatch.setattr(custom, "mix", scaled)
    with raises(UnsupportedError, where="MixerLM", what=("what follows", "number of tokens"), remedy="measure"):
        pl.trace(Subject.of(mixer()), length=48, prompts=4)


def test_doctor_and_trace_see_a_normalisation_over_the_whole_text() -> None:
    model: Any = mixer()
    model.blocks[1].norm.register_forward_hook(lambda module, args, out: out - out.mean(1, keepdim=True))
    assert diagnosed(model).verdict is DoctorVerdict.WRONG
    with raises(UnsupportedError, what=("what follows", "later tokens")):
        pl.trace(Subject.of(model), length=48, prompts=4)


@pytest.mark.parametrize("style", ["causal", "interface", "multihead"])
def test_an_ordinary_custom_model_has_no_state(style: str) -> None:
    assert pl.trace(Subject.of(mixer(style)), length=48, prompts=4).sources == ("earlier", "here", "origin")
