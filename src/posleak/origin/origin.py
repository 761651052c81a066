"""Position 0, whole: every part of this stage on one model, with as few forward passes as they can share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from posleak.errors import InputError
from posleak.inputs import InputFacts, prepare
from posleak.leakage import Jackknife
from posleak.leakage.sampled import LEVEL
from posleak.models import Identity, Subject
from posleak.probe import Calibration, calibrate, default_plan
from posleak.typed import plain

from .closure import Closure
from .context import Context, read_context
from .fingerprint import Fingerprint, fingerprint, written
from .portrait import Portrait, ordinary_tokens
from .position_probe import PositionProbe, position_probe, written_basis
from .projection import Projection, projections
from .reading import Reading
from .states import alone
from .trajectory import Scale, Trajectory

FINGERPRINT_TOKENS = 256
CALIBRATION_LENGTH = 128
TOKENS_AT_ONCE = 2048


@dataclass(frozen=True)
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
    position_probe: PositionProbe

    def as_dict(self) -> dict[str, Any]:
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


def origin(
    subject: Subject,
    *,
    length: int = 256,
    prompts: int = 8,
    tokens: int = 1024,
    seed: int = 0,
    bos: str | int = "auto",
    batch: int = 0,
    progress: Callable[[str], None] = lambda part: None,
) -> Origin:
    """Position 0 of a subject: prompts of random tokens for what needs a context, `tokens` first tokens for the rest.

    The reference token of trajectory and portrait is the BOS; with `bos="none"` it is the first of the drawn tokens.
    """
    plan = default_plan(length)
    _check(prompts, tokens)
    texts = prepare(subject, "random", bos=bos, length=length, seed=seed)
    drawn = ordinary_tokens(texts.vocabulary, tokens + 1, seed, without=texts.first.id)
    reference = int(drawn[0]) if texts.first.id is None else int(texts.first.id)
    others = drawn[drawn != reference][:tokens]
    progress("calibration")
    start = torch.from_numpy(texts.batch([0]))[:, :CALIBRATION_LENGTH].to(subject.device)
    calibration = calibrate(subject.model, start).require(subject.identity.name)
    found = projections(subject.model, start[:, :16])
    progress(f"portrait: {len(others)} first tokens")
    single = alone(subject.model, torch.from_numpy(np.concatenate([[reference], others])))
    at_once = batch or max(1, TOKENS_AT_ONCE // length)
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
        position_probe=_probe(subject, context, found, reading, seed, progress),
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


def _check(prompts: int, tokens: int) -> None:
    for name, value, least, why in (
        ("prompts", prompts, 3, "the position probe trains, chooses its ridge and is judged on different prompts"),
        ("tokens", tokens, 2, "cosines among first tokens need pairs of them"),
    ):
        if value < least:
            raise InputError(
                f"too few {name}: {why}", where="origin", got=value, expected=f"{least} or more",
                remedy=f"use --{name} {least} or more",
            )  # fmt: skip
