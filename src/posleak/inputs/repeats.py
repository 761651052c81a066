"""Prompts that repeat one another: intervals are taken over prompts as if each were drawn by itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from posleak.inputs.bodies import ConstantBody, GivenBody
from posleak.inputs.crops import CropBody
from posleak.inputs.prompts import Prompts

CHECKED_PROMPTS = 1000
"""Of more prompts, so many are looked at."""

OVERLAP_THRESHOLD = 0.25
"""Overlap is said from here on: the share of what prompts read that another prompt reads, too."""


def repeat_notes(prompts: Prompts, count: int) -> Iterator[str]:
    """What a user should know about `count` of these prompts: that some are equal, or that crops overlap."""
    looked = min(count, CHECKED_PROMPTS)
    ids = prompts.batch(range(looked))[:, -prompts.length :]
    different = len(np.unique(ids, axis=0))
    if different < looked:
        which = (
            f"all {looked} prompts are the same" if different == 1 else f"only {different} of {looked} prompts differ"
        )
        yield f"{which}: intervals are taken over prompts, and equal ones make them too narrow; {_instead(prompts)}"
    if isinstance(prompts.body, CropBody) and different > 1:
        yield from _overlap_notes(prompts.body, prompts.seed, prompts.length, looked)


def _instead(prompts: Prompts) -> str:
    if isinstance(prompts.body, ConstantBody):
        return "that is what a constant token is for, but use --inputs random or text:PATH for intervals"
    if isinstance(prompts.body, GivenBody):
        return "leave the copies out"
    text = isinstance(prompts.body, CropBody)
    return "use a longer or a more varied text" if text else "use an input with more variety"


def _overlap_notes(body: CropBody, seed: int, length: int, count: int) -> Iterator[str]:
    spans, text = body.spans(seed, count, length)
    shared, again = overlap(spans)
    if shared > OVERLAP_THRESHOLD:
        yield (
            f"the prompts overlap, so that intervals are too narrow: the text has about {text:,} tokens, {count} "
            f"prompts of {length} read {count * length:,}, and {shared:.0%} of that is read by another prompt, too "
            f"({again:.0%} of the text is read more than once); use a longer text, fewer --prompts or a shorter "
            "--length"
        )


def overlap(spans: np.ndarray) -> tuple[float, float]:
    """Of spans [B, 2] in parts of a text, which is 1: the share of what they read that is in two or more of them, and
    the share of the text that is."""
    edges = np.concatenate([spans[:, 0], spans[:, 1]])
    steps = np.repeat([1, -1], len(spans))
    order = np.argsort(edges, kind="stable")
    depth, width = np.cumsum(steps[order])[:-1], np.diff(edges[order])
    read = float((depth * width).sum())
    return float((depth * width)[depth > 1].sum()) / read, float(width[depth > 1].sum())
