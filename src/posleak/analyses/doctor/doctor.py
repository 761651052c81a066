"""The diagnosis: calibration, parity with the model's own attention, laws and rounding floors as a list of checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from posleak.defaults import DOCTOR_LENGTH, DOCTOR_PROMPTS
from posleak.edits import parse_edits
from posleak.errors import CheckError, UnsupportedError
from posleak.inputs import Prompts, bos_outside_vocabulary, prepare
from posleak.models import AnyModel, Subject, exclusive, subject_of
from posleak.models.offload import is_offloaded
from posleak.probe import Calibration, Motion, Plan, Positions, calibrate, default_plan, relative_difference
from posleak.probe.attachment import takes_positions
from posleak.probe.fingerprint import changed, identified
from posleak.probe.interface import computes_own_attention, implemented
from posleak.probe.native import native, states_of
from posleak.rounding import AGREE, computed_in
from posleak.runs.memory import MemoryPlan, ModelSizes, describe_prompts, fit_batch
from posleak.runs.notes import beyond_context
from posleak.runs.spec import MeasureSpec, parse_bytes, require_between
from posleak.show.notebook import html_table
from posleak.show.numbers import scientific
from posleak.signatures import checked
from posleak.text import visible
from posleak.typed import plain

from . import laws
from .laws import Check, DoctorVerdict
from .passes import FEW, PADDING, SharedPasses

LONGEST = 1280

SENTENCES = {
    DoctorVerdict.SOUND: "can be measured here, and every law holds",
    DoctorVerdict.BY_DESIGN: "can be measured here, and results are correct; the model breaks laws by design: {checks}",
    DoctorVerdict.WRONG: "results would be wrong here; a check failed, and no cause in the model is known: {checks}",
}


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """All checks of one model.

    calibration   as at the start of every measurement of the model
    first_token   the token at position 0, as a sentence;  notes: further remarks for the user
    positions     how the model encodes positions, in words
    """

    model: str
    length: int
    prompts: int
    calibration: Calibration
    checks: tuple[Check, ...]
    first_token: str = ""
    notes: tuple[str, ...] = ()
    positions: str = "not determined"

    @property
    def ok(self) -> bool:
        """Whether every check passed. If not, results may still be correct: see `verdict`."""
        return self.verdict is DoctorVerdict.SOUND

    @property
    def verdict(self) -> DoctorVerdict:
        """The worst verdict of all checks."""
        verdicts = {check.verdict for check in self.checks}
        return next((v for v in (DoctorVerdict.WRONG, DoctorVerdict.BY_DESIGN) if v in verdicts), DoctorVerdict.SOUND)

    @property
    def sentence(self) -> str:
        """The verdict as a sentence that names the checks responsible for it."""
        named = ", ".join(check.id for check in self.checks if check.verdict is self.verdict)
        return SENTENCES[self.verdict].format(checks=named)

    def __repr__(self) -> str:
        failed = [check.id for check in self.checks if not check.ok]
        outcome = f"failed: {', '.join(failed)}" if failed else f"all {len(self.checks)} checks passed"
        return f"Diagnosis({visible(self.model)}: {self.prompts} prompts of {self.length} tokens; {outcome})"

    def _repr_html_(self) -> str:
        """Return the verdict and a table of all checks, for notebooks."""
        facts = [describe_prompts(self.prompts, self.length), f"positions: {self.positions}", self.first_token]
        rows = (
            (check.mark, check.id, scientific(check.value), scientific(check.bound), check.unit, check.why)
            for check in self.checks
        )
        titles = ("", "check", "value", "bound", "unit", "why")
        return html_table(self.model, self.sentence, filter(None, facts), rows, titles, self.notes)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of `posleak doctor --json` (docs/json.md)."""
        verdict = {"ok": self.ok, "verdict": self.verdict, "sentence": self.sentence}
        document: dict[str, Any] = plain({"model": self.model, **verdict, **vars(self)})
        return document


def doctor_length(subject: Subject) -> int:
    """Return the default length: longer than every window of the model, up to LONGEST."""
    windows = [w for w in subject.identity.windows if w is not None and w * 5 // 4 <= LONGEST]
    length = max([DOCTOR_LENGTH, *(w * 5 // 4 for w in windows)])
    return min(length, subject.context or length)


@checked
def doctor(
    subject: AnyModel,
    *,
    length: int | None = None,
    prompts: int = DOCTOR_PROMPTS,
    seed: int = 0,
    bos: str | int = "auto",
    short: bool = False,
    max_memory: str | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Check whether a model can be measured and whether results are correct: calibration, parity, laws, rounding.

    All prompts are read in one forward pass, or in several if `max_memory` requires it. A diagnosis that does not fit
    into memory is rejected before the first forward pass.

    subject     a Subject, a transformers model, or anything that `load` accepts
    length      tokens per prompt: 96, or longer than the model's windows
    prompts     number of prompts, for the laws that hold on average
    seed        random seed for the prompts
    bos         token at position 0, as in `measure`; with "auto", a BOS that the model cannot embed is left out, and a
                note says so
    short       skip the checks that need many prompts (law L3) or rounded weights (rounding floors)
    max_memory  memory limit of the process, as in `measure`
    progress    callback that receives a status line

    Example: `posleak.doctor("smollm2-135m").verdict`
    """
    require_between("prompts", prompts, FEW, why="independence of the batch can only be checked with a second prompt")
    who, on_status = identified(subject_of(subject, max_memory)), progress or (lambda line: None)
    plan = default_plan(doctor_length(who) if length is None else length)
    long = beyond_context(who, MeasureSpec(length=plan.length, prompts=prompts))
    prompts_text = describe_prompts(prompts, plan.length)
    batch = fit_batch(
        who, lambda batch: doctor_plan(who, plan, prompts, batch, short=short), prompts, parse_bytes(max_memory),
        what="the diagnosis", remedy="a shorter --length or fewer --prompts",
        of=lambda batch: f"{prompts_text}, {batch} at once, and {FEW} of them under eager attention",
    )  # fmt: skip
    outside = bos_outside_vocabulary(who) if bos == "auto" else None
    no_bos = None if outside is None else f"{outside}: position 0 holds an ordinary token"
    base = prepare(who, "random", bos=bos if outside is None else "none", length=plan.length, seed=seed)
    with exclusive(who.model):
        calibration, checks, positions = _checks(who, base, plan, prompts, short, batch, on_status)
        notes = tuple(note for note in (no_bos, long, changed(who)) if note is not None)
    first = base.describe().first_token
    return Diagnosis(who.identity.name, plan.length, prompts, calibration, tuple(checks), first, notes, positions)


def doctor_plan(subject: Subject, plan: Plan, prompts: int, batch: int, *, short: bool = False) -> MemoryPlan:
    """Return the memory plan for all prompts, `batch` at once, and for FEW prompts under eager attention, at all depths
    and with rounded weights.

    Eager attention, and a constant that is added to one row of logits, hold tokens × tokens numbers.
    """
    sizes, item, T = ModelSizes.of(subject), subject.dtype.itemsize, plan.length + PADDING
    whole = sizes.states(FEW * T, item) + sizes.eager(FEW, T, item)
    rounded = not short and not is_offloaded(subject.model)
    copies = sizes.parameters * (2 if item == 4 else 4) if rounded else 0  # next to the model's own weights
    return MemoryPlan(
        activations=max(
            sizes.forward(batch * T, item) + sizes.own_pairs(batch, T, item),
            sizes.forward(FEW * T, max(4, item)) + max(whole, copies),
        ),
        rows=max(sizes.sampled(plan, at_once, T, max(4, item)) for at_once in (batch, FEW)),
        results=sizes.results(plan, prompts, layers=1) + 8 * prompts * T,
    )


def _checks(
    subject: Subject, base: Prompts, plan: Plan, prompts: int, short: bool, batch: int, progress: Callable[[str], None]
) -> tuple[Calibration, list[Check], str]:
    ids = base.batch(range(prompts))
    constant = prepare(subject, "constant", bos="none", length=plan.length, seed=base.seed).batch(range(1))
    progress("calibration")
    calibration = calibrate(subject.model, torch.from_numpy(ids[:1]).to(subject.device))
    room = None if subject.identity.rotary else subject.context
    passes = SharedPasses(subject.model, plan, ids, constant, calibration.learned_sinks, batch, room)
    checks = _calibration_checks(calibration)
    law_checks: dict[str, Callable[[SharedPasses], Check]] = {
        "parity with eager attention": eager_parity, "law L1": laws.additivity, "law L2": laws.constant_token,
        "law L3": laws.first_layer, "law L4": laws.zero_queries, "law L5": laws.shifted_positions,
        "law L7": laws.closure, "law L8, batches": laws.batching, "law L8, padding": laws.padding,
        "law L9": laws.gauge, "law L10": laws.moved_keys,
    }  # fmt: skip
    for name, law_check in law_checks.items():
        if not (short and name == "law L3"):
            progress(name)
            checks.append(law_check(passes))
    shift = next(check for check in checks if check.id == "L5 shift")
    for dtype in () if short else (torch.float32, torch.bfloat16, torch.float16):
        progress(f"rounding floor, {dtype}")
        checks.append(rounding_floor(passes, dtype, shift))
    positions = Positions.of(Motion.of(passes.placements, plan, subject.dtype), calibration)
    return calibration, checks, positions.text


def _calibration_checks(result: Calibration) -> list[Check]:
    own = f"states under the probe equal those of the model's own attention ({result.native})"
    rows = "the sampled rows have the softmax denominator of the kernel"
    return [
        Check("calls", 0.0, 0.0, "missing", f"all {result.layers} attention calls of a forward pass are observed"),
        Check("future", result.future, 0.0, "weight", "the kernel gives no weight to keys after the query"),
        Check("parity", result.parity, result.parity_bound, "relative", own),
        Check("partition", result.partition, result.partition_bound, "nats", rows),
    ]


def eager_parity(passes: SharedPasses) -> Check:
    """Compare the last states under the probe with those of eager attention, on left-padded prompts if possible.

    Next-token logits are not compared: they are a function of the states and slow with large vocabularies. A model with
    its own attention code is observed in its eager form, which may differ from its fused form.
    """
    model, dtype, why = passes.model, passes.model.dtype, "states under the probe equal those of eager attention"
    # In float64, eager attention masks keys with the lowest float64, and its float32 softmax of a padded row is NaN.
    padding = 0 if dtype == torch.float64 else PADDING
    why += f", with {padding} tokens of left padding" if padding else ""
    if computes_own_attention(model):
        with implemented(model, "eager"):
            states = passes.measure(passes.few, padding).states
    else:
        states = (passes.padded if padding else passes.together).states
    tokens, arguments = passes.tokens(passes.few, padding)
    with implemented(model, "eager"):
        eager = states_of(native(model, tokens, **arguments))[:, padding:]
    bound = AGREE.of(computed_in(dtype)) / 10

    def find_cause() -> str | None:
        own = states_of(native(model, tokens, **arguments))[:, padding:]
        name, differs = model.config._attn_implementation, relative_difference(own, eager) > bound
        return f"the model's own eager attention differs from its {name} attention" if differs else None

    check = Check("parity eager", relative_difference(states, eager), bound, "relative", why)
    return check.because(find_cause)


def rounding_floor(passes: SharedPasses, dtype: torch.dtype, shift: Check) -> Check:
    """Measure law L5 in another dtype: the change under a shift is rounding, a numerical source of leakage.

    shift   the check of the law in the model's own dtype
    """
    model, name = passes.model, str(dtype).removeprefix("torch.")
    why = f"change of log-attention under a shift of {passes.shift} positions in {name}: reported only"
    if not takes_positions(model):
        value, why = math.nan, "not measured: the model takes no position ids"
    elif not passes.shift:
        value, why = math.nan, "not measured: the prompt takes all positions of the model"
    elif model.dtype == dtype:
        value = shift.value
    else:
        edits = parse_edits([f"dtype={name}"])
        try:
            runs = [laws.log_attention(model, passes.plan, passes.ids[:1], at, edits) for at in (0, passes.shift)]
            value = laws.rms_change(*runs)
        except (CheckError, UnsupportedError) as error:
            value, why = math.inf, f"the model cannot be measured in {name}: {error.where}, {error.what}"
        except RuntimeError as error:  # raised by torch: some families mix float32 buffers with rounded states
            value, why = math.inf, f"the model does not run in {name}: {str(error).splitlines()[0]}"
    return Check(f"floor {name}", value, None, "nats rms", why)
