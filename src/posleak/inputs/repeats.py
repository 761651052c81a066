"""Warnings about equal or overlapping prompts. Confidence intervals assume that prompts are independent."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from posleak.inputs.bodies import ConstantBody, GivenBody
from posleak.inputs.crops import CropBody
from posleak.inputs.prompts import Prompts

CHECKED_PROMPTS = 1000
"""Maximum number of prompts that are compared."""

OVERLAP_THRESHOLD = 0.25
"""Share of the tokens that occur in several prompts above which a warning is issued."""


def repeat_notes(prompts: Prompts, count: int) -> Iterator[str]:
    """Yield warnings about the first `count` prompts: some are equal, or crops overlap."""
    checked = min(count, CHECKED_PROMPTS)
    ids = prompts.batch(range(checked))[:, -prompts.length :]
    different = len(np.unique(ids, axis=0))
    if different < checked:
        which = (
            f"all {checked} prompts are the same" if different == 1 else f"only {different} of {checked} prompts differ"
        )
        yield f"{which}: intervals over prompts are too narrow, since they assume independence; {_remedy(prompts)}"
    if isinstance(prompts.body, CropBody) and different > 1:
        yield from _overlap_notes(prompts.body, prompts.seed, prompts.length, checked)


def _remedy(prompts: Prompts) -> str:
    if isinstance(prompts.body, ConstantBody):
        return "this is expected of a constant token; use --inputs random or text:PATH for valid intervals"
    if isinstance(prompts.body, GivenBody):
        return "remove the copies"
    text = isinstance(prompts.body, CropBody)
    return "use a longer or more varied text" if text else "use inputs with more variety"


def _overlap_notes(body: CropBody, seed: int, length: int, count: int) -> Iterator[str]:
    spans, tokens = body.spans(seed, count, length)
    shared, repeated = overlap(spans)
    if shared > OVERLAP_THRESHOLD:
        yield (
            f"prompts overlap, so that intervals are too narrow: the text has about {tokens:,} tokens, {count} prompts "
            f"of {length} use {count * length:,}, and {shared:.0%} of these occur in another prompt too "
            f"({repeated:.0%} of the text is used more than once); use a longer text, fewer --prompts or a shorter "
            "--length"
        )


def overlap(spans: np.ndarray) -> tuple[float, float]:
    """Return the share of spans [B, 2] that another span covers too, and the share of the text [0, 1] that is."""
    edges = np.concatenate([spans[:, 0], spans[:, 1]])
    steps = np.repeat([1, -1], len(spans))
    order = np.argsort(edges, kind="stable")
    depth, width = np.cumsum(steps[order])[:-1], np.diff(edges[order])
    read = float((depth * width).sum())
    return float((depth * width)[depth > 1].sum()) / read, float(width[depth > 1].sum())
