"""Can this model be measured, and are the numbers right here? The long form of calibration, as a table of checks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from posleak.errors import CheckError
from posleak.inputs import prepare
from posleak.models import AnyModel, Subject, subject_of
from posleak.probe import (
    Calibration,
    Motion,
    Plan,
    Positions,
    attach,
    body,
    calibrate,
    default_plan,
    exclusive,
    relative_difference,
    takes_positions,
)
from posleak.probe.attachment import implemented
from posleak.rounding import AGREE
from posleak.runs.memory import MemoryPlan, fitting, many, require_room
from posleak.runs.spec import parse_bytes, require_between
from posleak.text import visible

from . import laws
from .check import Check
from .memory import FEW, PADDING, doctor_plan

LENGTH = 96
LONGEST = 1280
PROMPTS = 12


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """All checks of one model; `calibration` is what every measurement of it would start with, `positions` how it tells
    positions apart, in words."""

    model: str
    length: int
    prompts: int
    calibration: Calibration
    checks: tuple[Check, ...]
    positions: str = "not looked at"

    @property
    def ok(self) -> bool:
        """Did every check pass?"""
        return all(check.ok for check in self.checks)

    def __repr__(self) -> str:
        failed = [check.id for check in self.checks if not check.ok]
        found = f"failed: {', '.join(failed)}" if failed else f"all {len(self.checks)} checks passed"
        return f"Diagnosis({visible(self.model)}: {self.prompts} prompts of {self.length} tokens; {found})"

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of `posleak doctor --json` (docs/json.md)."""
        return {
            "model": self.model, "ok": self.ok, "length": self.length, "prompts": self.prompts,
            "positions": self.positions,
            "checks": [check.as_dict() for check in self.checks], "calibration": self.calibration.as_dict(),
        }  # fmt: skip


def doctor_length(subject: Subject) -> int:
    """Long enough that every window hides something, where that is affordable."""
    windows = [w for w in subject.identity.windows if w is not None and w * 5 // 4 <= LONGEST]
    length = max([LENGTH, *(w * 5 // 4 for w in windows)])
    return min(length, subject.context or length)


def doctor(
    subject: AnyModel,
    *,
    length: int | None = None,
    prompts: int = PROMPTS,
    seed: int = 0,
    short: bool = False,
    max_memory: str | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Can this model be measured, and are the numbers right here: calibration, parity, laws, rounding floors.

    All prompts are read at once, fewer where `max_memory` asks for it. What cannot fit is refused before the first
    forward pass.

    subject     a Subject, a model of transformers, or what `load` takes
    length      tokens per prompt: 96, or longer than the model's windows
    prompts     how many, for the laws that hold on average
    seed        of the tokens
    short       leave out what needs many prompts (law L3) or copies of the model (the floors)
    max_memory  what the process may hold, as in `measure`
    progress    called with what is done now, in words
    """
    require_between("prompts", prompts, FEW, why="that a prompt does not depend on its batch needs a second one")
    who, say = subject_of(subject), progress or (lambda check: None)
    plan = default_plan(doctor_length(who) if length is None else length)
    batch = _batch(who, plan, prompts, short, parse_bytes(max_memory))
    with exclusive(who.model):
        return _diagnosis(who, plan, prompts, seed, short, batch, say)


def _batch(subject: Subject, plan: Plan, prompts: int, short: bool, limit: int | None) -> int:
    """How many prompts are read at once: all, or as many as fit; refused where not even one does."""

    def planned(batch: int) -> MemoryPlan:
        return doctor_plan(subject, plan, prompts, batch, short=short)

    batch = fitting(subject, prompts, planned, limit)
    require_room(
        subject, planned(batch), limit, what="the diagnosis",
        of=f"{many(prompts, plan.length)}, {batch} at once, and {FEW} of them under eager attention",
        remedy="use a shorter --length or fewer --prompts",
    )  # fmt: skip
    return batch


def _diagnosis(
    subject: Subject,
    plan: Plan,
    prompts: int,
    seed: int,
    short: bool,
    batch: int,
    progress: Callable[[str], None],
) -> Diagnosis:
    length = plan.length
    ids = prepare(subject, "random", length=length, seed=seed).batch(range(prompts))
    constant = prepare(subject, "constant", bos="none", length=length, seed=seed).batch(range(1))
    progress("calibration")
    calibration = calibrate(subject.model, torch.from_numpy(ids[:FEW]).to(subject.device))
    bench = laws.Bench(subject.model, plan, ids, constant, calibration.learned_sinks, batch)
    checks = list(_calibration_checks(calibration))
    for name, check in _law_checks(bench):
        if not (short and name == "law L3"):
            progress(name)
            checks.append(check())
    for dtype in () if short else (torch.float32, torch.bfloat16, torch.float16):
        progress(f"rounding floor, {dtype}")
        checks.append(rounding_floor(bench, dtype))
    positions = Positions.of(Motion.of(bench.placements, plan, subject.dtype), calibration)
    return Diagnosis(subject.identity.name, length, prompts, calibration, tuple(checks), positions.text)


def _calibration_checks(found: Calibration) -> Iterator[Check]:
    yield Check("calls", 0.0, 0.0, "missing", f"all {found.layers} attention calls of a forward pass are seen")
    yield Check("future", found.future, 0.0, "weight", "the kernel puts no weight on keys after the query")
    why = f"states under the probe equal those of the model's own attention ({found.native})"
    yield Check("parity", found.parity, found.parity_bound, "relative", why)
    why = "the sampled rows have the denominator that the kernel used"
    yield Check("partition", found.partition, found.partition_bound, "nats", why)


def _law_checks(bench: laws.Bench) -> Iterator[tuple[str, Callable[[], Check]]]:
    yield "parity with eager attention", lambda: eager_parity(bench)
    yield "law L1", lambda: laws.additivity(bench)
    yield "law L2", lambda: laws.constant_token(bench)
    yield "law L3", lambda: laws.first_layer(bench)
    yield "law L4", lambda: laws.zero_queries(bench)
    yield "law L5", lambda: laws.shifted_positions(bench, laws.SHIFT)
    yield "law L7", lambda: laws.closure(bench)
    yield "law L8, batches", lambda: laws.batching(bench)
    yield "law L8, padding", lambda: laws.padding(bench)
    yield "law L9", lambda: laws.gauge(bench)
    yield "law L10", lambda: laws.moved_keys(bench)


def eager_parity(bench: laws.Bench, padding: int = PADDING) -> Check:
    """The model's last states under the probe against its eager attention's, on left-padded prompts.

    Next-token logits are not compared: they follow from the states, and take most of the time in large vocabularies.
    A model that computes its attention itself is watched in its eager form, which may differ from its fused one.
    """
    model = bench.model
    ids = torch.from_numpy(np.pad(bench.few, ((0, 0), (padding, 0)), mode="edge")).to(model.device)
    keep = torch.ones_like(ids)
    keep[:, :padding] = 0
    call = {"input_ids": ids, "attention_mask": keep, "use_cache": False}
    with exclusive(model), torch.inference_mode(), implemented(model, "eager"):
        expected = body(model)(**call)[0][:, padding:]
        with attach(model):
            found = body(model)(**call)[0][:, padding:]
    why = f"states under the probe equal those of eager attention, with {padding} tokens of left padding"
    return Check("parity eager", relative_difference(found, expected), AGREE.of(model.dtype) / 10, "relative", why)


def rounding_floor(bench: laws.Bench, dtype: torch.dtype) -> Check:
    """Law L5 in another dtype: what shifting position ids changes there is rounding, a numerical source of leakage."""
    model = bench.model if bench.model.dtype == dtype else in_dtype(bench.model, dtype)
    name = str(dtype).removeprefix("torch.")
    what = f"change of log-attention under a shift of {laws.SHIFT} positions in {name}"
    why = f"{what}: measured, not judged"
    if not takes_positions(model):
        return Check(f"floor {name}", 0.0, None, "nats rms", f"{what}: not measured, the model takes no position ids")
    try:
        value = laws.shift_floor(model, bench.plan, bench.few, laws.SHIFT)
    except CheckError as error:
        value, why = math.inf, f"the model cannot be measured in {name}: {error.where}, {error.what}"
    except (
        RuntimeError
    ) as error:  # torch's own: some families mix their buffers, which stay float32, with rounded states
        value, why = math.inf, f"the model does not run in {name}: {str(error).splitlines()[0]}"
    return Check(f"floor {name}", value, None, "nats rms", why)


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy with its parameters in another dtype. Buffers keep theirs: rotary frequencies must not be rounded."""
    with exclusive(model):
        buffers, clone = dict(model.named_buffers()), copy.deepcopy(model)
    torch.nn.Module.to(clone, dtype)
    for name, module in clone.named_modules():
        for key in module._buffers:
            module._buffers[key] = buffers[f"{name}.{key}" if name else key]
    return clone
