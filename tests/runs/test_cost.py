"""What a measurement costs: time by stage, memory against a plan, and nothing done twice."""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import posleak as pl
from posleak.edits import parse_edits
from posleak.errors import InputError, TooLargeError
from posleak.models import Subject
from posleak.models.memory import LIBRARY_BYTES
from posleak.peak import PeakMemory
from posleak.probe import Call, attach, backbone, call as kernel, default_plan, read_placements
from posleak.probe.interface import attention_calls
from posleak.probe.rows import Frame, scaled_weights
from posleak.runs.memory import memory_plan, weight_bytes
from posleak.runs.spec import MeasureSpec, parse_bytes
from posleak.stopwatch import Stopwatch, stage
from support.errors import raises
from support.families import FAMILIES, subject, tiny
from support.runs_tiny import counted_passes

N = 64
PLAN = default_plan(N)


# Time by stage


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until a test moves it."""
    now = [100.0]
    monkeypatch.setattr("posleak.stopwatch.time.perf_counter", lambda: now[0])
    return now


def test_an_inner_stage_is_not_counted_in_the_outer_one(clock: list[float]) -> None:
    with Stopwatch(before=7.0) as watch:
        clock[0] += 1
        with stage("forward"):
            clock[0] += 10
            for _ in range(3):
                with stage("rows"):
                    clock[0] += 2
            clock[0] += 5
    assert watch.seconds == {"start": 7, "other": 1, "forward": 15, "rows": 6}
    assert watch.entries["rows"] == 3
    assert watch.total == 29
    shares = [row["share"] for row in watch.as_dict()["stages"]]
    assert sum(shares) == pytest.approx(1)


def test_a_stage_that_fails_is_left(clock: list[float]) -> None:
    def fail() -> None:
        with stage("forward"):
            clock[0] += 3
            raise ValueError("no")

    with Stopwatch() as watch:
        with pytest.raises(ValueError, match="no"):
            fail()
        clock[0] += 4
    assert watch.seconds == {"other": 4, "forward": 3}


def test_without_a_stopwatch_nothing_is_counted() -> None:
    with Stopwatch() as watch:
        pass
    with stage("later"):
        pass
    assert "later" not in watch.seconds


def test_a_measurement_names_its_stages() -> None:
    with Stopwatch() as watch:
        pl.measure(subject(), length=N, prompts=4, batch=2)
    assert watch.entries["forward"] == 2
    assert watch.entries["rows"] == watch.entries["split"] == 2 * 3
    assert {"prompts", "calibration", "constant token", "arrays", "summary"} <= set(watch.seconds)


# Memory against a plan


@pytest.mark.parametrize("kernel_counts", [True, False])
def test_the_peak_is_what_was_held_at_most(kernel_counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel_counts:
        monkeypatch.setattr("posleak.peak._reset_peak", lambda: False)
    with PeakMemory() as peak:
        held = mmap.mmap(-1, 64 * 10**6)  # an allocator could reuse memory that is resident already
        for _ in range(64):
            held.write(b"1" * 10**6)
        for _ in range(6000):  # until it is sampled
            if kernel_counts or peak._largest - peak._before > 60e6:
                break
            time.sleep(0.01)
        held.close()
    assert 60e6 < peak.bytes < 100e6


def test_the_peak_starts_anew() -> None:
    held = np.ones(8_000_000)
    del held
    with PeakMemory() as peak:
        pass
    assert peak.bytes < 8e6


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GB", 8e9), ("500 mb", 5e8), ("2GiB", 2**31), ("1.5k", 1500), ("1024", 1024), (77, 77), (None, None)],
)
def test_amounts_of_memory(text: str | int | None, expected: float | None) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "8 apples", "-1GB", "iB"])
def test_no_amount_of_memory(text: str) -> None:
    with raises(InputError, where="--max-memory", got=repr(text), expected="8GB"):
        parse_bytes(text)


def test_the_plan_grows_linearly_with_the_length() -> None:
    llama = subject()
    specs = [MeasureSpec(length=n, prompts=1, batch=1) for n in (2048, 4096, 8192)]
    plans = [memory_plan(llama, spec) for spec in specs]
    for shorter, longer in pairwise(plans):
        assert longer.activations == 2 * shorter.activations
        assert longer.rows <= 2.2 * shorter.rows


def test_an_edit_that_copies_the_weights_is_planned_for() -> None:
    llama = subject()
    specs = (MeasureSpec(length=N, batch=1, edits=parse_edits(e)) for e in ((), ("dtype=float64",)))
    plain, wide = (memory_plan(llama, spec) for spec in specs)
    assert wide.activations == 2 * plain.activations + 2 * weight_bytes(llama)


def limited(llama: Subject, room: int) -> int:
    """A limit that leaves `room` bytes above the loaded model."""
    return weight_bytes(llama) + LIBRARY_BYTES + room


def test_batches_are_chosen_to_fit_and_the_numbers_stay() -> None:
    llama = subject()
    asked: dict[str, Any] = {"length": N, "prompts": 8, "seed": 3}
    whole = pl.measure(llama, **asked)
    assert whole.record.spec.batch == 8
    room = memory_plan(llama, MeasureSpec(**asked, batch=2)).total
    run = pl.measure(llama, max_memory=limited(llama, room), **asked)
    assert run.record.spec.batch == 2
    assert run.record.memory.total <= room
    assert np.allclose(run.data["drift"], whole.data["drift"], atol=1e-5, equal_nan=True)


def test_a_batch_that_was_asked_for_is_refused_rather_than_changed() -> None:
    llama = subject()
    room = memory_plan(llama, MeasureSpec(length=N, prompts=8, batch=2)).total
    limit = limited(llama, room)
    with (
        counted_passes(llama.model) as passes,
        raises(InputError, what="--max-memory", got="8 prompts of 64 tokens", remedy="--batch"),
    ):
        pl.measure(llama, max_memory=limit, length=N, prompts=8, batch=8)
    assert passes == []


def test_a_limit_below_the_model_itself_is_refused() -> None:
    llama = subject()
    with raises(TooLargeError, what="--max-memory", got="weights and libraries", remedy=("bfloat16", "--offload")):
        pl.measure(llama, max_memory=limited(llama, -5), length=N, prompts=2)


# What positions do: a few tokens, each alone, where that is enough


SCALED: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "llama_4_scaling_beta": 0.2,
        "original_max_position_embeddings": 8,
    }
}
COUNTS_ITSELF: dict[str, Any] = {
    "no_rope_layers": [1, 0], "num_hidden_layers": 2, "floor_scale": 8, "attn_scale": 0.2, "hidden_size": 32,
    "intermediate_size": 48, "intermediate_size_mlp": 48, "num_local_experts": 4, "head_dim": 16,
}  # fmt: skip


@contextmanager
def counted_shapes(model: torch.nn.Module) -> Iterator[list[tuple[int, ...]]]:
    seen: list[tuple[int, ...]] = []
    hook = backbone(model).register_forward_pre_hook(  # type: ignore[arg-type]
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("family", "more"), [*((name, {}) for name in FAMILIES), ("ministral3", SCALED), ("llama4_text", COUNTS_ITSELF)]
)
def test_tokens_alone_tell_what_the_whole_prompt_tells(
    family: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token repeated has equal states too, unless learned sink logits make them differ after the first layer."""
    model, ids = tiny(family, **more), torch.arange(3, 3 + N)[None]
    alone = read_placements(model, ids, PLAN)
    monkeypatch.setattr("posleak.probe.placement.takes_positions", lambda model: False)
    whole = read_placements(model, ids, PLAN)
    assert len(alone) == len(whole)
    pairs = list(zip(alone, whole, strict=True))
    for one, other in pairs[:1] if family == "gpt_oss" else pairs:
        assert one.rotation is not None
        assert other.rotation is not None
        x = torch.randn(len(PLAN.rows), 3, model.config.head_dim, dtype=torch.float64)
        a, b = (rotation.turned(x, rotation.angles[:, None]) for rotation in (one.rotation, other.rotation))
        assert torch.allclose(a, b, atol=1e-3)
        assert one.moves == other.moves
        assert (one.temperature is None) == (other.temperature is None)
        if one.temperature is not None and other.temperature is not None:
            assert torch.allclose(one.temperature, other.temperature, rtol=1e-4)


def test_it_is_a_few_dozen_tokens_unless_the_model_counts_its_tokens_itself() -> None:
    ids, places = torch.arange(3, 3 + N)[None], 1 + len(PLAN.rows) + 6 + (N - 1).bit_length()
    for family, more, expected in (
        ("llama", {}, [(3 * places, 1)]),
        ("mixtral", {}, [(3 * places, 1)]),  # counts tokens only to send them to experts
        ("llama4_text", COUNTS_ITSELF, [(3 * places, 1), (2, N)]),
    ):
        model = tiny(family, **more)
        attention_calls(model)  # a pass of its own
        with counted_shapes(model) as seen:
            read_placements(model, ids, PLAN)
        assert seen == expected, family


def test_position_ids_of_edits_count_there_too() -> None:
    """Shifted by 64, queries are scaled as positions 64 and later are; by the model's own formula."""
    model, ids = tiny("ministral3", **SCALED), torch.full((1, N), 5)
    t = read_placements(model, ids, PLAN, parse_edits(["shift=64"]))[0].temperature
    assert t is not None
    of = [1 + 0.2 * math.log(1 + (64 + p) // 8) for p in (0, *PLAN.rows)]
    assert torch.allclose(t, torch.tensor(of[1:], dtype=torch.float64) / of[0], rtol=1e-5)


# Rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_are_the_exponentials_and_exactly_zero_where_hidden(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 40 * torch.randn(2, 3, len(PLAN.rows), N, generator=generator, dtype=dtype)
    logits[..., 30:40] -= 2000  # far below what exp can show
    visible = torch.arange(N) <= torch.tensor(PLAN.rows)[:, None]
    frame = Frame.of(visible, PLAN)
    weights, peak = scaled_weights(logits, frame)
    summed = visible & (torch.arange(N) >= PLAN.origin)
    assert bool((weights[..., ~summed] == 0).all())
    exact = (logits.double() - peak).exp()[..., summed]
    assert torch.allclose(weights[..., summed].double(), exact, rtol=1e-5, atol=1e-30)
    assert torch.equal(peak[..., 0], logits.double().masked_fill(~summed, -torch.inf).amax(-1))


# Each head is attended once


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Heads × queries of every call of the kernel."""
    seen: list[int] = []
    plain = kernel._attend

    def counted(call: Call) -> Tensor:
        seen.append(call.query.shape[1] * call.query.shape[2])
        return plain(call)

    monkeypatch.setattr(kernel, "_attend", counted)
    return seen


@pytest.mark.parametrize("edit", ["sink=cut", "sink=cut@1.2", "sink=freeze", "sink=freeze@0", "window=9"])
def test_an_edit_attends_every_head_once(edit: str, attended: list[int]) -> None:
    model = tiny("llama")
    with attach(model, [], parse_edits([edit])) as probe:
        probe.forward(torch.randint(3, 101, (2, N), generator=torch.Generator().manual_seed(2)))
    assert sum(attended) == 3 * 3 * N  # layers, heads, queries


@pytest.mark.parametrize("family", ["qwen2", "gpt_oss", "gemma3_text"])
@pytest.mark.parametrize("what", ["unread", "frozen"])
def test_some_heads_edited_are_the_same_as_all_edited_in_those_heads(family: str, what: str) -> None:
    """Heads with key heads of their own, learned sink logits, windows; frozen in one prompt and not in the other."""
    more: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}
    looks: list[Call] = []

    class Look:
        def observe(self, call: Call, out: Tensor) -> None:
            looks.append(call)

    with attach(tiny(family, **more), [Look()]) as probe:
        probe.forward(torch.randint(3, 101, (2, N), generator=torch.Generator().manual_seed(4)))
    for call in looks:
        H = call.heads
        some, everyone = torch.arange(H) % 2 == 1, torch.ones(H, dtype=torch.bool)
        plain = kernel.attend(call)
        if what == "unread":
            whole, part = (kernel.attend(replace(call, unread=heads)) for heads in (everyone, some))
            expected = torch.where(some[:, None, None], whole, plain)
        else:
            share = torch.rand(2, H, generator=torch.Generator().manual_seed(5))
            mixed = some & torch.tensor([[True], [False]])
            whole = kernel.attend(replace(call, frozen=share))
            part = kernel.attend(replace(call, frozen=share.masked_fill(~mixed, torch.nan)))
            expected = torch.where(mixed[..., None, None], whole, plain)
        assert not torch.allclose(whole[:, :, 1:], plain[:, :, 1:], atol=1e-3)
        assert torch.allclose(part, expected, atol=1e-6)
