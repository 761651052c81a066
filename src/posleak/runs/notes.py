"""Notes that a run carries as warnings, and errors about sizes that a model does not support."""

from __future__ import annotations

import math
from collections.abc import Iterator

from posleak.axes import layer_names
from posleak.errors import CheckError, InputError, shorter_prompts
from posleak.inputs.prompts import DONOR_MARGIN
from posleak.leakage import MIN_PROMPTS, narrow_layers
from posleak.leakage.dataset import Chunk
from posleak.leakage.summary import KEYS_AFTER_ORIGIN, SINK_RATIO
from posleak.metrics import Meters
from posleak.models import Subject
from posleak.probe.fingerprint import FINGERPRINT_TOKENS
from posleak.probe.native import ungrouped

from .run import Run
from .spec import MeasureSpec

# -- before the run ---------------------------------------------------------------------------------------------------


def beyond_context(subject: Subject, spec: MeasureSpec) -> str | None:
    """Return a note if a rotary model reads more positions than it was trained on; None if it does not.

    Raise an InputError if the model has no such positions.
    """
    context, read = subject.context, spec.length + spec.borrowed + spec.shifted
    if spec.shifted < 0 and not subject.identity.rotary:
        raise InputError("the shift leads to positions before 0", where=subject.identity.name, got=spec.shifted)
    if context is None or read <= context:
        return None
    after = f" after a context of {spec.borrowed}" if spec.borrowed else ""
    after += f", shifted by {spec.shifted}," if spec.shifted else ""
    what = f"length {spec.length}{after} is beyond the model's context of {context} positions"
    if not subject.identity.rotary:
        most = (context - DONOR_MARGIN) // 2 if spec.borrowed else context - spec.shifted
        raise InputError(what, where=subject.identity.name, remedy=shorter_prompts(most))
    return f"{what}: results beyond it are extrapolation"


def size_notes(subject: Subject, spec: MeasureSpec) -> Iterator[str]:
    """Yield notes about prompts that are long, too short for a sliding window, or too few; raise if they are too
    long."""
    if (long := beyond_context(subject, spec)) is not None:
        yield long
    if (window := min((w for w in subject.identity.windows if w is not None), default=0)) >= spec.length:
        yield (
            f"the sliding window of {window} tokens is longer than the prompts: it hides no key, and windowed layers "
            f"are measured like global ones; use --length {2 * window} or more to measure the effect of the window"
        )
    dtype = next((edit.weights_dtype for edit in spec.edits if edit.weights_dtype), subject.dtype)
    if ungrouped(subject.model, dtype):
        yield (
            f"torch has no grouped products of experts in {str(dtype).removeprefix('torch.')}: experts are multiplied "
            "one after the other, which takes longer but does not change the results"
        )
    if spec.prompts < MIN_PROMPTS:
        powers = "powers and intervals" if spec.prompts < 2 else "intervals"
        yield (
            f"too few prompts ({spec.prompts}) to separate noise from signal, so there are no {powers}; use --prompts "
            f"{MIN_PROMPTS} or more"
        )


def require_finite_logits(subject: Subject) -> None:
    """Raise a CheckError if the model's logits are not finite, so that the loss is not defined."""
    total = (subject.identity.fingerprint or (0.0,))[-1]
    if not math.isfinite(total):
        raise CheckError(
            "the model's logits are not finite, so the loss is not defined", where=subject.identity.name,
            got=f"log Σ exp(logits) is {total} after a prompt of {FINGERPRINT_TOKENS} tokens",
            remedy="measure without --loss; if the language-model head should be correct, download the weights again",
        )  # fmt: skip


# -- after the run ----------------------------------------------------------------------------------------------------


def result_notes(run: Run) -> Iterator[str]:
    """Yield notes about layers whose sink is wider than the origin, and about layers whose origin cannot be moved."""
    names, origin, motion = layer_names(run.record.calibration.numbers), run.record.plan.origin, run.record.motion
    if narrow := narrow_layers(run.data, origin):
        where = f"layer{'s' if len(narrow) > 1 else ''} {', '.join(names[call] for call in narrow)}"
        yield (
            f"the origin of {origin} token{'s' if origin > 1 else ''} is narrower than the sink in {where}: late "
            f"queries attend to the {KEYS_AFTER_ORIGIN} keys after it more than {SINK_RATIO:g} times as much as to "
            "ordinary ones. The split into mask, drift and sink depends on the width there: compare with --origin "
            f"{max(narrow.values())}. Shares by source changed little from 4 to 8 on SmolLM2 (docs/robustness.md)"
        )
    if motion.stays:
        layers = f"layers {', '.join(names[call] for call in motion.stays)}"
        where = "every layer" if len(motion.stays) == len(motion.layers) else layers
        yield f"origin keys cannot be moved in {where}, and keep their positions in the crop: {motion.why}"


def unseen_metrics(meters: Meters | None, batch: Chunk) -> Iterator[str]:
    """Yield a note that names the requested metrics without results, if there are any."""
    if meters is not None and (names := meters.unseen(batch)):
        yield (
            f"metrics {', '.join(names)} are left out: the prompts are too short for a spectrum (wavelets), or the "
            "model's layers do not pass on one residual stream (massive, valley, probe)"
        )
