"""Can this model be measured, and are the numbers right here? The long form of calibration, as a table of checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posleak.edits import parse_edits
from posleak.errors import CheckError, UnsupportedError
from posleak.inputs import Prompts, bos_outside_vocabulary, prepare
from posleak.models import AnyModel, Subject, exclusive, subject_of
from posleak.probe import (
    Calibration,
    Motion,
    Plan,
    Positions,
    calibrate,
    default_plan,
    relative_difference,
    takes_positions,
)
from posleak.probe.attachment import implemented
from posleak.probe.fingerprint import changed, identified
from posleak.probe.native import native
from posleak.probe.tracer import computes_own_attention
from posleak.rounding import AGREE, computed_in
from posleak.runs.measure import beyond_context
from posleak.runs.memory import Work, describe_prompts
from posleak.runs.spec import MeasureSpec, parse_bytes, require_between
from posleak.signatures import checked
from posleak.text import visible

from . import laws
from .check import Check, DoctorVerdict
from .memory import FEW, PADDING, doctor_plan
from .passes import SharedPasses

LENGTH = 96
LONGEST = 1280
PROMPTS = 12

SENTENCES = {
    DoctorVerdict.SOUND: "can be measured here, and every law holds",
    DoctorVerdict.BY_DESIGN: "can be measured here, and the numbers are right; the model breaks laws on purpose: {checks}",
    DoctorVerdict.WRONG: "numbers would be wrong here; a check failed, and no cause in the model is known: {checks}",
}


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """All checks of one model; `calibration` is what every measurement of it would start with.

    first_token   what stood at position 0, as a sentence;  notes: what else the user should know
    positions     how it tells positions apart, in words
    """

    model: str
    length: int
    prompts: int
    calibration: Calibration
    checks: tuple[Check, ...]
    first_token: str = ""
    notes: tuple[str, ...] = ()
    positions: str = "not looked at"

    @property
    def ok(self) -> bool:
        """Did every check pass? Where this is false, the numbers may still be right: `verdict` says it."""
        return self.verdict is DoctorVerdict.SOUND

    @property
    def verdict(self) -> DoctorVerdict:
        """One check that failed without a cause is enough to doubt the numbers."""
        found = {check.verdict for check in self.checks}
        return next((v for v in (DoctorVerdict.WRONG, DoctorVerdict.BY_DESIGN) if v in found), DoctorVerdict.SOUND)

    @property
    def sentence(self) -> str:
        """The verdict, and which checks made it."""
        named = ", ".join(check.id for check in self.checks if check.verdict is self.verdict)
        return SENTENCES[self.verdict].format(checks=named)

    def __repr__(self) -> str:
        failed = [check.id for check in self.checks if not check.ok]
        found = f"failed: {', '.join(failed)}" if failed else f"all {len(self.checks)} checks passed"
        return f"Diagnosis({visible(self.model)}: {self.prompts} prompts of {self.length} tokens; {found})"

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of `posleak doctor --json` (docs/json.md)."""
        return {
            "model": self.model, "ok": self.ok, "verdict": self.verdict.value, "sentence": self.sentence,
            "length": self.length, "prompts": self.prompts, "positions": self.positions,
            "first_token": self.first_token, "notes": self.notes,
            "checks": [check.as_dict() for check in self.checks], "calibration": self.calibration.as_dict(),
        }  # fmt: skip


def doctor_length(subject: Subject) -> int:
    """Long enough that every window hides something, where that is affordable."""
    windows = [w for w in subject.identity.windows if w is not None and w * 5 // 4 <= LONGEST]
    length = max([LENGTH, *(w * 5 // 4 for w in windows)])
    return min(length, subject.context or length)


@checked
def doctor(
    subject: AnyModel,
    *,
    length: int | None = None,
    prompts: int = PROMPTS,
    seed: int = 0,
    bos: str | int = "auto",
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
    bos         position 0, as in `measure`; with "auto", a BOS that the model cannot embed is left out, and a note says
                so
    short       leave out what needs many prompts (law L3) or rounded weights (the floors)
    max_memory  what the process may hold, as in `measure`
    progress    called with what is done now, in words
    """
    require_between("prompts", prompts, FEW, why="that a prompt does not depend on its batch needs a second one")
    who, say = identified(subject_of(subject)), progress or (lambda check: None)
    plan = default_plan(doctor_length(who) if length is None else length)
    long = beyond_context(who, MeasureSpec(length=plan.length, prompts=prompts))
    batch = _batch(who, plan, prompts, short, parse_bytes(max_memory))
    outside = bos_outside_vocabulary(who) if bos == "auto" else None
    said = None if outside is None else f"{outside}: position 0 holds an ordinary token"
    policy = bos if outside is None else "none"
    texts = prepare(who, "random", bos=policy, length=plan.length, seed=seed)
    with exclusive(who.model):
        calibration, checks, positions = _checks(who, texts, plan, prompts, short, batch, say)
        notes = tuple(note for note in (said, long, changed(who)) if note is not None)
    first = texts.describe().first_token
    return Diagnosis(who.identity.name, plan.length, prompts, calibration, tuple(checks), first, notes, positions)


def _batch(subject: Subject, plan: Plan, prompts: int, short: bool, limit: int | None) -> int:
    """How many prompts are read at once: all, or as many as fit; refused where not even one does."""
    prompts_text = describe_prompts(prompts, plan.length)
    return Work(
        "the diagnosis", lambda batch: doctor_plan(subject, plan, prompts, batch, short=short),
        lambda batch: f"{prompts_text}, {batch} at once, and {FEW} of them under eager attention",
        "a shorter --length or fewer --prompts",
    ).fit(subject, prompts, limit)  # fmt: skip


def _checks(
    subject: Subject,
    texts: Prompts,
    plan: Plan,
    prompts: int,
    short: bool,
    batch: int,
    progress: Callable[[str], None],
) -> tuple[Calibration, list[Check], str]:
    ids = texts.batch(range(prompts))
    constant = prepare(subject, "constant", bos="none", length=plan.length, seed=texts.seed).batch(range(1))
    progress("calibration")
    calibration = calibrate(subject.model, torch.from_numpy(ids[:1]).to(subject.device))
    room = None if subject.identity.rotary else subject.context
    passes = SharedPasses(subject.model, plan, ids, constant, calibration.learned_sinks, batch, room)
    checks = list(_calibration_checks(calibration))
    for name, check in _law_checks(passes):
        if not (short and name == "law L3"):
            progress(name)
            checks.append(check())
    shift = next(check for check in checks if check.id == "L5 shift")
    for dtype in () if short else (torch.float32, torch.bfloat16, torch.float16):
        progress(f"rounding floor, {dtype}")
        checks.append(rounding_floor(passes, dtype, shift))
    positions = Positions.of(Motion.of(passes.placements, plan, subject.dtype), calibration)
    return calibration, checks, positions.text


def _calibration_checks(found: Calibration) -> Iterator[Check]:
    yield Check("calls", 0.0, 0.0, "missing", f"all {found.layers} attention calls of a forward pass are seen")
    yield Check("future", found.future, 0.0, "weight", "the kernel puts no weight on keys after the query")
    why = f"states under the probe equal those of the model's own attention ({found.native})"
    yield Check("parity", found.parity, found.parity_bound, "relative", why)
    why = "the sampled rows have the denominator that the kernel used"
    yield Check("partition", found.partition, found.partition_bound, "nats", why)


def _law_checks(passes: SharedPasses) -> Iterator[tuple[str, Callable[[], Check]]]:
    yield "parity with eager attention", lambda: eager_parity(passes)
    yield "law L1", lambda: laws.additivity(passes)
    yield "law L2", lambda: laws.constant_token(passes)
    yield "law L3", lambda: laws.first_layer(passes)
    yield "law L4", lambda: laws.zero_queries(passes)
    yield "law L5", lambda: laws.shifted_positions(passes)
    yield "law L7", lambda: laws.closure(passes)
    yield "law L8, batches", lambda: laws.batching(passes)
    yield "law L8, padding", lambda: laws.padding(passes)
    yield "law L9", lambda: laws.gauge(passes)
    yield "law L10", lambda: laws.moved_keys(passes)


def eager_parity(passes: SharedPasses) -> Check:
    """The model's last states under the probe against its eager attention's, on left-padded prompts where it can pad.

    Next-token logits are not compared: they follow from the states, and take most of the time in large vocabularies.
    A model that computes its attention itself is watched in its eager form, which may differ from its fused one.
    """
    model, dtype, why = passes.model, passes.model.dtype, "states under the probe equal those of eager attention"
    # In float64 eager attention hides keys by float64's lowest number, and its float32 softmax is NaN behind padding.
    padding = 0 if dtype == torch.float64 else PADDING
    why += f", with {padding} tokens of left padding" if padding else ""
    if computes_own_attention(model):
        with implemented(model, "eager"):
            found = passes.look(passes.few, padding).states
    else:
        found = (passes.padded if padding else passes.together).states
    bound = AGREE.of(computed_in(dtype)) / 10
    return Check("parity eager", relative_difference(found, _eager_states(passes, padding)), bound, "relative", why)


def _eager_states(passes: SharedPasses, padding: int) -> Tensor:
    tokens, given = passes.tokens(passes.few, padding)
    with implemented(passes.model, "eager"):
        found: Tensor = native(passes.model, tokens, **given)[0]
    return found[:, padding:]


def rounding_floor(passes: SharedPasses, dtype: torch.dtype, shift: Check) -> Check:
    """Law L5 in another dtype: what shifting position ids changes there is rounding, a numerical source of leakage.

    `shift`: the law in the model's own dtype.
    """
    model, name = passes.model, str(dtype).removeprefix("torch.")
    why = f"change of log-attention under a shift of {passes.shift} positions in {name}: measured, not judged"
    if not takes_positions(model):
        value, why = math.nan, "not measured: the model takes no position ids"
    elif not passes.shift:
        value, why = math.nan, "not measured: the prompt takes all positions that the model has"
    elif model.dtype == dtype:
        value = shift.value
    else:
        value, why = _rounded(passes, name, why)
    return Check(f"floor {name}", value, None, "nats rms", why)


def _rounded(passes: SharedPasses, name: str, why: str) -> tuple[float, str]:
    edits = parse_edits([f"dtype={name}"])
    try:
        return laws.shift_floor(passes.model, passes.plan, passes.ids[:1], passes.shift, edits), why
    except (CheckError, UnsupportedError) as error:
        return math.inf, f"the model cannot be measured in {name}: {error.where}, {error.what}"
    except RuntimeError as error:  # torch's own: some families mix float32 buffers with rounded states
        return math.inf, f"the model does not run in {name}: {str(error).splitlines()[0]}"
