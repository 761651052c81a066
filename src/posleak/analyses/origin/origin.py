"""Position 0, whole: every part of this stage on one model, with as few forward passes as they can share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posleak.errors import warn
from posleak.inputs import InputFacts, Prompts, prepare
from posleak.leakage import Jackknife
from posleak.leakage.sampled import LEVEL
from posleak.models import AnyModel, Identity, Subject, exclusive, subject_of
from posleak.probe import Calibration, Plan, calibrate, default_plan
from posleak.probe.fingerprint import changed, identified
from posleak.runs.measure import beyond_context
from posleak.runs.memory import Work, describe_prompts
from posleak.runs.spec import MeasureSpec, parse_bytes, require_between
from posleak.signatures import checked
from posleak.text import visible
from posleak.typed import plain

from .closure import Closure
from .context import Context, read_context
from .fingerprint import FINGERPRINT_TOKENS, Fingerprint, fingerprint, written
from .memory import origin_plan
from .portrait import Portrait, ordinary_tokens
from .position_probe import PositionProbe, position_probe, written_basis
from .projection import Projection, projections
from .reading import Reading
from .states import alone
from .trajectory import Scale, Trajectory

CALIBRATION_LENGTH = 128
TOKENS_AT_ONCE = 2048


@dataclass(frozen=True, repr=False)
class Origin:
    """Everything about position 0 of one model. Its JSON is `record.OriginRecord`; arrays for figures stay in the
    parts: `portrait.picture`, `reading.attention`, `fingerprint.matrices`, `position_probe.curves`."""

    identity: Identity
    inputs: InputFacts
    length: int
    prompts: int
    seed: int
    reference_is_bos: bool
    calibration: Calibration
    closure: Closure
    trajectory: Trajectory
    portrait: Portrait
    reading: Reading
    fingerprint: Fingerprint
    position_probe: PositionProbe | None

    def __repr__(self) -> str:
        token, readers = (
            self.trajectory.spelled or self.trajectory.token,
            sum(int(x.sum()) for x in self.reading.readers),
        )
        facts = f"{self.prompts} prompts of {self.length} tokens, {len(self.portrait.tokens)} first tokens"
        line = f"{self.identity.name}: {facts}; reference {token!r}; {readers} sink-reading heads"
        return f"Origin({visible(line)})"

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of `posleak origin --json` (docs/json.md)."""
        token, spelled = self.trajectory.token, self.trajectory.spelled
        found: dict[str, Any] = plain(
            {
                "model": self.identity.name, "identity": self.identity, "inputs": self.inputs, "length": self.length,
                "prompts": self.prompts, "tokens": len(self.portrait.tokens), "seed": self.seed, "level": LEVEL,
                "reference": {"token": token, "spelled": spelled, "is_bos": self.reference_is_bos},
                "calibration": self.calibration, "closure": self.closure, "trajectory": self.trajectory,
                "portrait": self.portrait, "reading": self.reading, "fingerprint": self.fingerprint,
                "position_probe": self.position_probe,
            }
        )  # fmt: skip
        return found


@checked
def origin(
    subject: AnyModel,
    *,
    length: int = 256,
    prompts: int = 8,
    tokens: int = 1024,
    seed: int = 0,
    bos: str | int = "auto",
    batch: int = 0,
    probe: bool = True,
    max_memory: str | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Origin:
    """Position 0 of a subject: what stands there, what becomes of it, who reads it, and what that tells later tokens.

    The reference token of trajectory and portrait is the BOS; with `bos="none"` it is the first of the drawn tokens.
    What cannot fit into memory is refused before the first forward pass.

    subject     a Subject, a model of transformers, or what `load` takes
    length      tokens per prompt, for what needs a context
    prompts     how many prompts of random tokens
    tokens      how many first tokens the portrait shows
    seed        of the tokens
    bos         position 0, as in `measure`
    batch       prompts at once (0: about 2048 tokens, fewer where `max_memory` asks for it)
    probe       read position off the states, too: half of the time
    max_memory  what the process may hold, as in `measure`
    progress    called with what is done now, in words
    """
    plan = default_plan(length)
    _check(prompts, tokens, batch)
    who, say = identified(subject_of(subject)), progress or (lambda part: None)
    long = beyond_context(who, MeasureSpec(length=length, prompts=prompts))
    at_once = _batch(who, plan, prompts, tokens, batch, parse_bytes(max_memory))
    if long is not None:
        warn(long)
    texts = prepare(who, "random", bos=bos, length=length, seed=seed)
    with exclusive(who.model):
        found = _origin(who, texts, plan, prompts, tokens, at_once, probe, say)
        if (note := changed(who)) is not None:
            warn(note)
    return found


def _batch(subject: Subject, plan: Plan, prompts: int, tokens: int, batch: int, limit: int | None) -> int:
    """How many prompts are read at once: as asked for, or as many as fit; refused where they do not."""
    work = Work(
        "the look at position 0",
        lambda at_once: origin_plan(subject, plan, prompts, min(tokens, subject.vocab_size), at_once),
        lambda at_once: f"{describe_prompts(prompts, plan.length)}, {at_once} at once, and {tokens} first tokens",
        "a shorter --length, fewer --prompts or --tokens", batched=True,
    )  # fmt: skip
    at_once = min(batch or max(1, TOKENS_AT_ONCE // plan.length), prompts)
    return work.fit(subject, at_once, limit, fixed=bool(batch))


def _origin(
    subject: Subject,
    texts: Prompts,
    plan: Plan,
    prompts: int,
    tokens: int,
    at_once: int,
    probe: bool,
    progress: Callable[[str], None],
) -> Origin:
    length, seed = texts.length, texts.seed
    drawn = ordinary_tokens(texts.vocabulary, tokens + 1, seed, without=texts.first.id)
    reference = int(drawn[0]) if texts.first.id is None else int(texts.first.id)
    others = drawn[drawn != reference][:tokens]
    progress("calibration")
    start = torch.from_numpy(texts.batch([0]))[:, :CALIBRATION_LENGTH].to(subject.device)
    calibration = calibrate(subject.model, start).require(subject.identity.name)
    found = projections(subject.model, start[:, :16])
    progress(f"portrait: {len(others)} first tokens")
    single = alone(subject.model, torch.from_numpy(np.concatenate([[reference], others])))
    context = read_context(subject, texts, plan, found, others, prompts, at_once, progress)
    progress("portrait and fingerprint")
    scale, reading = Scale.of(context.body), Reading.of(context.reading, plan, found, Jackknife(prompts))
    few = [values[: FINGERPRINT_TOKENS + 1] for values in single.values]
    return Origin(
        identity=subject.identity, inputs=texts.describe(), length=length, prompts=prompts, seed=seed,
        reference_is_bos=texts.first.id is not None, calibration=calibration, closure=context.closure,
        trajectory=Trajectory.of(single.states[0], scale, reference, texts.vocabulary.spell(reference)),
        portrait=Portrait.of(single, scale),
        reading=reading,
        fingerprint=fingerprint(found, reading.readers, context.same, few, context.carried, context.changed),
        position_probe=_probe(subject, context, found, reading, seed, progress) if probe else None,
    )  # fmt: skip


def _probe(
    subject: Subject,
    context: Context,
    found: Sequence[Projection],
    reading: Reading,
    seed: int,
    progress: Callable[[str], None],
) -> PositionProbe:
    """Directions are those of the prompts' first tokens: one with a BOS, else their mean."""
    means = [values.mean(0, keepdim=True) for values in context.values]
    depths, width = len(context.body), context.body[0].shape[-1]
    directions = [_directions(*of, width) for of in zip(found, reading.readers, means, strict=True)]
    return position_probe(
        context.body, context.positions, written_basis(directions, reading.layers, depths, width), seed=seed,
        device=subject.device if subject.device.type == "cuda" else None,
        progress=lambda done, of: progress(f"position probe: depth {done} of {of - 1}"),
    )  # fmt: skip


def _directions(
    projection: Projection, readers: Bool[np.ndarray, "H"], values: Float[Tensor, "1 K Ev"], width: int
) -> Float[Tensor, "k {width}"]:
    """W_h v_0 of the sink-reading heads of one call; none where W_O is not known."""
    heads = np.flatnonzero(readers).tolist()
    if projection.space == "value" or not heads:
        return torch.zeros(0, width)
    return written(projection, values, heads)[:, 0].float()


def _check(prompts: int, tokens: int, batch: int) -> None:
    """Refuse numbers that cannot be meant, or that are too few for what is done with them."""
    require_between(
        "prompts", prompts, 3, why="the position probe trains, chooses its ridge and is judged on different prompts"
    )
    require_between("tokens", tokens, 2, why="cosines among first tokens need pairs of them")
    require_between("batch", batch, 0)
