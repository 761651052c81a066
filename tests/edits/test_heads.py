"""Ablation of heads: what they write is replaced exactly, everything else is untouched, and the model is restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import posleak as pl
from posleak.edits import NamedEdit, parse_edit, parse_edits
from posleak.edits.heads import AblatedHeads
from posleak.edits.positional import fit_prompts, fit_size
from posleak.errors import InputError, UnsupportedError
from posleak.inputs import prepare
from posleak.models import Subject
from posleak.probe import Collector, attach
from posleak.runs.run import Run
from support.errors import raises
from support.families import subject, tiny
from support.runs_tiny import assert_same_bits

LAYERS, HEADS, WIDTH, ORIGIN = 3, 3, 10, 4
SMALL: dict[str, Any] = {"length": 48, "prompts": 5, "batch": 2, "seed": 3}
IDS = torch.tensor(np.random.default_rng(0).integers(3, 101, (2, 40)))


def written(model: Any, *edits: NamedEdit) -> tuple[list[Tensor], Tensor]:
    """Return the input of the output projection of every layer [B, T, H, Ev], and the last states."""
    taken = list[Tensor]()

    def keep(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        taken.append(args[0].unflatten(-1, (HEADS, -1)))

    with attach(model, edits=edits) as probe:
        hooks = [layer.self_attn.o_proj.register_forward_pre_hook(keep) for layer in model.model.layers]
        states = probe.forward(IDS).last_hidden_state
        for hook in hooks:
            hook.remove()
    return taken, states


def prepared(who: Subject, text: str, length: int = 40) -> NamedEdit:
    base = prepare(who, "random", bos="auto", length=length, seed=0)
    return parse_edit(text).prepared(who, base, ORIGIN, {})


@pytest.mark.parametrize("method", ["zero", "mean"])
def test_the_output_of_the_head_is_replaced_and_nothing_else(llama: Subject, method: str) -> None:
    edit = prepared(llama, f"head={method}@1.2")
    (before, _), (after, states) = written(llama.model), written(llama.model, edit)
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1][:, :, :2], before[1][:, :, :2]), "the other heads of the layer, bit for bit"
    assert isinstance(edit, AblatedHeads)
    means = None if edit.means is None else edit.means[1][2].to(after[1])
    expected = torch.zeros(WIDTH) if means is None else means
    assert torch.equal(after[1][:, :, 2], expected.expand(2, 40, WIDTH)), "at every position"
    assert not torch.equal(after[2], before[2])
    again, plain = written(llama.model)
    assert all(torch.equal(one, other) for one, other in zip(again, before, strict=True)), "the model is restored"
    assert not torch.equal(plain, states)


@pytest.mark.parametrize("text", ["head=zero@1.2", "head=zero@0-1", "head=zero@0.0,2.1"])
def test_zero_is_a_model_without_the_columns_of_these_heads(llama: Subject, text: str) -> None:
    """An independent implementation: the columns of W_O that read the heads are 0."""
    columns = {"head=zero@1.2": [(1, 2)], "head=zero@0-1": [(layer, head) for layer in (0, 1) for head in range(3)],
               "head=zero@0.0,2.1": [(0, 0), (2, 1)]}  # fmt: skip
    model: Any = tiny("llama")
    for layer, head in columns[text]:
        model.model.layers[layer].self_attn.o_proj.weight[:, head * WIDTH : (head + 1) * WIDTH] = 0
    edited, expected = pl.measure(llama, **SMALL, edits=text, loss=True), pl.measure(model, **SMALL, loss=True)
    for name, array in expected.data.data_vars.items():
        np.testing.assert_allclose(edited.data[name].values, array.values, rtol=1e-4, atol=1e-4, err_msg=str(name))
    (touched,) = edited.record.touched
    assert touched.heads == len(columns[text])
    assert touched.layers == tuple(sorted({layer for layer, _ in columns[text]}))


@pytest.mark.parametrize(
    ("family", "projection"),
    [("gpt2", "transformer.h.{}.attn.c_proj"), ("falcon", "transformer.h.{}.self_attention.dense"),
     ("bloom", "transformer.h.{}.self_attention.dense"), ("phi", "model.layers.{}.self_attn.dense"),
     ("gemma2", "model.layers.{}.self_attn.o_proj")],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:origin keys cannot be moved")
def test_families_are_ablated_alike(family: str, projection: str) -> None:
    """Transposed weights, attention that the model computes itself, biases, and norms after the projection."""
    who, model = subject(family), tiny(family)
    heads = who.identity.heads
    weight: Any = model.get_submodule(projection.format(1)).weight
    rows = family == "gpt2"
    Ev = weight.shape[0 if rows else 1] // heads
    weight[(slice(Ev, 2 * Ev),) if rows else (slice(None), slice(Ev, 2 * Ev))] = 0
    edited, expected = pl.measure(who, **SMALL, edits="head=zero@1.1"), pl.measure(model, **SMALL)
    for name in ("drift", "mask", "sink", "weight"):
        np.testing.assert_allclose(edited.data[name].values, expected.data[name].values, rtol=1e-4, atol=1e-4)
    plain = pl.measure(who, **SMALL)
    assert np.nanmax(np.abs(edited.data["drift"].values - plain.data["drift"].values)[:, 2]) > 0.01


@dataclass(frozen=True)
class Unchanged(AblatedHeads):
    def replacement(self, call: int, out: Tensor) -> Tensor:
        return out.transpose(1, 2)


def test_heads_that_are_replaced_by_themselves_change_no_bit(llama: Subject) -> None:
    same = Unchanged(parse_edit("head=zero@0-2").scope)  # type: ignore[attr-defined]
    run = pl.measure(llama, **SMALL, edits=same)
    assert_same_bits(run, pl.measure(llama, **SMALL))
    assert run.record.touched[0].heads == LAYERS * HEADS


def test_the_mean_is_that_of_separate_prompts_after_the_origin(llama: Subject) -> None:
    base = prepare(llama, "random", bos="auto", length=48, seed=3)
    cache: dict[Any, Any] = {}
    edit = parse_edit("head=mean@1.0").prepared(llama, base, ORIGIN, cache)
    assert isinstance(edit, AblatedHeads)
    assert edit.means is not None
    own, outputs = fit_prompts(llama, base), Collector(lambda call, out: out)
    with attach(llama.model, [outputs]) as probe:
        probe.forward(torch.from_numpy(own.batch(range(fit_size(48)))))
    for found, out in zip(edit.means, outputs.collect(), strict=True):
        torch.testing.assert_close(found, out[:, :, ORIGIN:].double().mean((0, 2)), rtol=1e-5, atol=1e-6)
    assert not np.array_equal(own.batch([0]), base.batch([0]))
    again = parse_edit("head=mean@2.1").prepared(llama, base, ORIGIN, cache)
    assert again.means is edit.means  # type: ignore[attr-defined]
    assert len(cache) == 1
    with raises(InputError, where="head=mean@1.0", remedy="posleak.measure"), attach(
        llama.model, edits=parse_edits("head=mean@1.0")
    ) as probe:  # fmt: skip
        probe.forward(IDS)


@pytest.mark.parametrize("text", ["head=zero@1.2", "head=mean@0-1"])
def test_a_run_under_an_ablation_is_stored_and_traced(llama: Subject, tmp_path: Path, text: str) -> None:
    whole = pl.measure(llama, **SMALL, edits=text, out=tmp_path / "run")
    loaded = Run.load(tmp_path / "run")
    assert loaded.record.spec.edits == (parse_edit(text),)
    (touched,) = loaded.record.touched
    assert ("sha256" in " ".join(touched.beside)) == ("mean" in text)
    assert_same_bits(pl.measure(llama, **SMALL, edits=text), whole)
    trace = pl.trace(llama, length=48, prompts=5, seed=3, edits=text)
    assert_same_bits(trace.ordinary, pl.measure(llama, length=48, prompts=5, seed=3, edits=text))
    assert trace.remainder < 1e-3


def test_an_ablation_of_all_earlier_layers_leaves_no_earlier_source(llama: Subject) -> None:
    """Without any output of attention, states carry no position from masks: `earlier` is 0 to rounding."""
    trace = pl.trace(llama, length=48, prompts=5, seed=3, edits="head=zero@0-2")
    earlier, total = (trace.components[name].values for name in ("earlier", "total"))
    assert np.nanmax(np.abs(earlier)) < 1e-3 * np.nanmax(np.abs(total))


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("head=zero", {"what": "scope", "remedy": "head=zero@3.1"}),
        ("head=mean", {"what": "scope", "remedy": "head=mean@3.1"}),
        ("head=median@1.1", {"expected": "head=zero|mean@LAYERS.HEADS"}),
        ("head=zero@1.3", {"got": "head 3 of layer 1", "expected": "heads 0 to 2"}),
        ("head=zero@7.0", {"got": "layer 7", "expected": "0 to 2"}),
        (["head=zero@1.1", "head=mean@2.0"], {"got": "output of heads", "remedy": "separate runs"}),
    ],
)  # fmt: skip
def test_what_cannot_be_ablated_is_refused(llama: Subject, text: Any, fields: dict[str, object]) -> None:
    with raises(InputError, **fields):
        pl.measure(llama, **SMALL, edits=text)


@contextmanager
def unhooked(model: Any) -> Iterator[None]:
    """Check that nothing stays in the model."""

    def count() -> int:
        return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())

    before = count()
    yield
    assert count() == before


def test_a_model_that_combines_heads_itself_is_refused() -> None:
    """DiffLlama writes differences of heads: there is no output of one head."""
    who = subject("diffllama")
    with unhooked(who.model), raises(UnsupportedError, where=("layer 1", "head=zero@1.1"), got="DiffLlama"):
        pl.measure(who, **SMALL, edits="head=zero@1.1")


def test_it_combines_with_other_edits(llama: Subject) -> None:
    texts = ("head=zero@1.1", "window=16", "sink=cut@2")
    with unhooked(llama.model):
        run = pl.measure(llama, **SMALL, edits=texts)
    assert run.record.spec.edit_texts == ("window=16", "sink=cut@2", "head=zero@1.1")
    assert all(not effect.nothing for effect in run.record.touched)
    narrow = pl.measure(llama, **SMALL, edits=texts[1:])
    np.testing.assert_array_equal(run.data["drift"].values[:, :2], narrow.data["drift"].values[:, :2])
    assert np.nanmax(np.abs(run.data["drift"].values - narrow.data["drift"].values)[:, 2]) > 0.01
