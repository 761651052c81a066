"""One model, several threads: measurements of it take turns, and nothing of them stays behind."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel

import posleak as pl
from posleak.analyses.doctor.doctor import doctor
from posleak.analyses.origin.origin import origin
from posleak.edits import parse_edits
from posleak.errors import RunError
from posleak.models import Subject
from posleak.models.hold import _holds, exclusive
from posleak.probe import Call, attach, backbone, calibrate, default_plan
from posleak.runs.loop import Passes
from support.errors import assert_fields, raises
from support.families import subject, tiny
from support.runs_tiny import assert_same_bits

ASKED: dict[str, Any] = {"length": 48, "prompts": 4, "batch": 2, "seed": 3}
N = 48
IDS = np.random.default_rng(0).integers(3, 101, (6, N))
LONG = 200.0
"""Seconds after which a thread that should have gone on counts as stuck."""


def untouched(model: PreTrainedModel) -> tuple[Any, ...]:
    """All of a model and of transformers' registries that an attachment changes."""
    configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    names = [sorted(kind._global_mapping) for kind in (AttentionInterface, AttentionMaskInterface)]
    weights = [(name, x.dtype, x.data_ptr()) for name, x in (*model.named_parameters(), *model.named_buffers())]
    return [config._attn_implementation for config in configs.values()], hooks, names, weights


@contextmanager
def left_as_it_was(*models: PreTrainedModel) -> Iterator[None]:
    before = [untouched(model) for model in models]
    yield
    assert [untouched(model) for model in models] == before
    assert not _holds


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    """The results of all, started together; an error of any is raised."""
    ready = threading.Barrier(len(work))

    def started(each: Callable[[], Any]) -> Any:
        ready.wait(LONG)
        return each()

    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result(LONG * 5) for future in [pool.submit(started, each) for each in work]]


class Waiting:
    """An observer that stops at its first call until it is told to go on; it counts the calls it sees."""

    def __init__(self) -> None:
        self.inside, self.go_on, self.calls = threading.Event(), threading.Event(), 0

    def observe(self, call: Call, out: Tensor) -> None:
        self.calls += 1
        self.inside.set()
        assert self.go_on.wait(LONG)


# Taking turns


def test_two_threads_measure_one_model_as_if_alone(tmp_path: Path) -> None:
    llama = subject()
    conditions = {"plain": (), "edited": ("dtype=float64", "sink=cut", "bos=zero")}
    alone = {name: pl.measure(llama, edits=edits, **ASKED) for name, edits in conditions.items()}
    with left_as_it_was(llama.model):
        for round_ in range(20):
            places = {name: tmp_path / f"{name}-{round_}" for name in conditions}
            work = [
                lambda edits=edits, out=places[name]: pl.measure(llama, edits=edits, out=out, **ASKED)
                for name, edits in conditions.items()
            ]
            for name, run in zip(conditions, in_threads(*work), strict=True):
                assert_same_bits(run, alone[name])
                assert run.record.calibration == alone[name].record.calibration
                assert run.record.calibration.native == "sdpa"


def test_two_models_that_share_a_config_take_turns() -> None:
    one = tiny("llama")
    other = AutoModelForCausalLM.from_config(one.config).eval()
    other.load_state_dict(tiny("llama", seed=1).state_dict())
    assert other.config is one.config
    subjects = [Subject.of(model) for model in (one, other)]
    alone = [pl.measure(each, **ASKED) for each in subjects]
    with left_as_it_was(one, other):
        for _round in range(10):
            work = [lambda each=each: pl.measure(each, **ASKED) for each in subjects]
            for run, expected in zip(in_threads(*work), alone, strict=True):
                assert_same_bits(run, expected)


def test_a_second_thread_waits_until_the_model_is_free() -> None:
    model, look, order = tiny("llama"), Waiting(), []

    def first() -> None:
        with attach(model, [look]) as probe:
            probe.forward(torch.from_numpy(IDS))
            order.append("first")

    def second() -> None:
        assert look.inside.wait(LONG)
        with attach(model):
            order.append("second")

    def release() -> None:
        assert look.inside.wait(LONG)
        time.sleep(0.2)
        assert order == []
        look.go_on.set()

    with left_as_it_was(model):
        in_threads(first, second, release)
    assert order == ["first", "second"]


@pytest.mark.parametrize(
    "work",
    [
        lambda llama: calibrate(llama.model, torch.from_numpy(IDS[:1])),
        lambda llama: doctor(llama, length=N, prompts=3, short=True).as_dict(),
        lambda llama: origin(llama, length=N, prompts=3, tokens=8).as_dict(),
    ],
    ids=["calibrate", "doctor", "origin"],
)
def test_what_needs_the_models_own_attention_waits_too(work: Callable[[Subject], Any]) -> None:
    """Under an edit of another thread it would see other weights, another attention, another dtype."""
    llama = subject()
    asked: dict[str, Any] = {**ASKED, "edits": ("dtype=float64", "rope=ntk:4")}
    expected = str(work(llama))
    with left_as_it_was(llama.model):
        for _round in range(3):
            _, found = in_threads(lambda: pl.measure(llama, **asked), lambda: work(llama))
            assert str(found) == expected


def test_a_model_that_is_held_can_be_attached_inside_and_held_again() -> None:
    model = tiny("llama")
    with left_as_it_was(model), exclusive(model), exclusive(model), attach(model) as probe:
        probe.forward(torch.from_numpy(IDS))
        assert probe.calls == 3


# Refusals


def test_a_second_attachment_of_the_same_thread_is_refused() -> None:
    model = tiny("llama")
    with left_as_it_was(model), attach(model) as probe:
        before = untouched(model)
        with raises(RunError, what="already", got="this thread", remedy="`with attach(...)`"), attach(model):
            pass
        with raises(RunError, what="already", got="this thread"), exclusive(model):
            pass
        assert untouched(model) == before
        probe.forward(torch.from_numpy(IDS))
        assert probe.calls == 3


def test_the_refusal_says_that_a_config_is_shared() -> None:
    one = tiny("llama")
    other = AutoModelForCausalLM.from_config(one.config).eval()
    with (
        left_as_it_was(one, other),
        attach(one),
        raises(RunError, what="shares its config", got="this thread"),
        attach(other),
    ):
        pass


def test_a_generator_that_is_not_finished_keeps_the_model() -> None:
    llama = subject()
    chunks = Passes(llama.model, default_plan(N)).measure([IDS[:2], IDS[2:4]])
    with left_as_it_was(llama.model):
        next(chunks)
        with raises(RunError, what="already", remedy="close()"):
            pl.measure(llama, **ASKED)
        chunks.close()
        pl.measure(llama, **ASKED)


@pytest.mark.parametrize("circle", [False, True])
def test_a_generator_that_is_given_up_frees_the_model(circle: bool) -> None:
    llama, edits = subject(), parse_edits(["bos=zero", "rope=ntk:4", "dtype=float64"])
    with left_as_it_was(llama.model):
        chunks = Passes(llama.model, default_plan(N), edits=edits).measure([IDS[:2], IDS[2:4]])
        next(chunks)
        kept: list[Any] = [chunks]
        if circle:
            kept.append(kept)  # only the garbage collector frees it: refusing a model, posleak looks again
        gc.disable()
        try:
            del chunks, kept
            pl.measure(llama, **ASKED)
        finally:
            gc.enable()


def test_a_generator_of_a_thread_that_has_ended_is_no_reason_to_wait() -> None:
    llama, kept = subject(), list[Any]()

    def begin() -> None:
        kept.append(Passes(llama.model, default_plan(N)).measure([IDS[:2], IDS[2:4]]))
        next(kept[0])

    thread = threading.Thread(target=begin, name="the one that began")
    thread.start()
    thread.join()
    with raises(RunError, what="already", got="ended", remedy="close()"):
        pl.measure(llama, **ASKED)
    next(kept[0])  # taken up by this thread, which has it now
    with raises(RunError, what="already", got="this thread"):
        pl.measure(llama, **ASKED)
    kept[0].close()
    assert not _holds


def test_an_error_inside_frees_the_model() -> None:
    llama = subject()

    class Fails:
        def observe(self, call: Call, out: Tensor) -> None:
            raise ValueError("no")

    with left_as_it_was(llama.model):
        for _round in range(2):
            with pytest.raises(ValueError, match="no"), attach(llama.model, [Fails()]) as probe:
                probe.forward(torch.from_numpy(IDS))
        with pytest.raises(KeyboardInterrupt):
            pl.measure(llama, progress=interrupt, **ASKED)
        pl.measure(llama, **ASKED)


def interrupt(done: int, of: int) -> None:
    raise KeyboardInterrupt


# Forward passes of the user's own


def test_a_users_own_pass_in_another_thread_is_refused_there_and_not_counted() -> None:
    model, look = tiny("llama"), Waiting()
    ids = torch.from_numpy(IDS)

    def measuring() -> int:
        with attach(model, [look]) as probe:
            probe.forward(ids)
            return probe.calls

    def using(call: Callable[[], Any]) -> None:
        assert look.inside.wait(LONG)
        try:
            with (
                raises(RunError, what="another thread", got="a pass in", remedy="copy"),
                torch.inference_mode(),
            ):
                call()
        finally:
            look.go_on.set()

    for call in (lambda: model(input_ids=ids), lambda: backbone(model)(input_ids=ids)):
        look.calls, look.inside, look.go_on = 0, threading.Event(), threading.Event()
        with left_as_it_was(model):
            calls, _ = in_threads(measuring, partial(using, call))
        assert calls == look.calls == 3


def test_a_pass_that_was_under_way_is_refused_at_its_next_attention_call() -> None:
    """It began before the model was attached, so that nothing but the attention call itself can notice it."""
    model, inside, attached = tiny("llama"), threading.Event(), threading.Event()
    ids, mine = torch.from_numpy(IDS), threading.get_ident()

    def slow(module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() != mine:
            inside.set()
            assert attached.wait(LONG)

    hook = model.get_submodule("model.layers.1").register_forward_pre_hook(slow)
    errors = list[RunError]()

    def using() -> None:
        try:
            backbone(model)(input_ids=ids)
        except RunError as error:
            errors.append(error)

    user = threading.Thread(target=using)
    user.start()
    assert inside.wait(LONG)
    with attach(model) as probe:
        probe.forward(ids)
        attached.set()
        user.join(LONG)
        assert probe.calls == 3
    hook.remove()
    assert_fields(errors[0], what="another thread", remedy="copy")


def test_a_users_passes_beside_a_measurement_leave_its_numbers_alone() -> None:
    llama, over = subject(), threading.Event()
    expected, ids = pl.measure(llama, **ASKED), torch.from_numpy(IDS)

    def using() -> int:
        refused = 0
        while not over.is_set():
            try:
                with torch.inference_mode():
                    llama.model(input_ids=ids[:1])
            except (RunError, KeyError):  # KeyError: transformers looked up our name when it was gone already
                refused += 1
        return refused

    def measuring() -> pl.Run:
        try:
            for _round in range(3):
                run = pl.measure(llama, **ASKED)
            return run
        finally:
            over.set()

    with left_as_it_was(llama.model):
        refused, run = in_threads(using, measuring)
    assert refused > 0
    assert_same_bits(run, expected)


def test_two_threads_cannot_use_one_attachment_at_once() -> None:
    model, look = tiny("llama"), Waiting()
    ids = torch.from_numpy(IDS)

    def other(probe: Any) -> None:
        assert look.inside.wait(LONG)
        try:
            with raises(RunError, what="another thread", got="a pass in"):
                probe.forward(ids)
        finally:
            look.go_on.set()

    with left_as_it_was(model), attach(model, [look]) as probe:
        in_threads(lambda: probe.forward(ids), lambda: other(probe))
        assert probe.calls == 3


def test_a_generator_can_be_taken_up_by_another_thread() -> None:
    llama = subject()
    batches = [IDS[:2], IDS[2:4], IDS[4:]]
    expected = list(Passes(llama.model, default_plan(N)).measure(batches))
    with left_as_it_was(llama.model):
        chunks = Passes(llama.model, default_plan(N)).measure(batches)
        found = [in_threads(lambda: next(chunks))[0] for _ in batches]
        assert next(chunks, None) is None
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one["drift"], other["drift"], equal_nan=True)
