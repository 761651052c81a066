"""The effect of positions in every layer of a model, and whether a borrowed context is defined for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from posleak.edits import NamedEdit
from posleak.edits.context import BRANCHED, MEASURE_INSTEAD, Branches, branches_of, prefix_difference
from posleak.errors import UnsupportedError
from posleak.models import exclusive, input_device
from posleak.probe import Edit, Placement, Plan, read_placements
from posleak.probe.placement import gap_bound
from posleak.rounding import AGREE
from posleak.stopwatch import stage

PlacementCache = dict[tuple[tuple[NamedEdit, ...], bytes], list[Placement]]
"""Placements of one model, by the placing edits and by the first prompt."""

SCALED_QUERIES = "it scales its queries by absolute position"


def placements_of(
    model: PreTrainedModel, ids: NDArray[np.int64], plan: Plan, edits: Sequence[Edit] = (),
    alone: list[Placement] | None = None,
) -> list[Placement]:  # fmt: skip
    """Return the effect of positions in every layer, at the plan's rows.

    ids [B, T] may have a donor before each prompt. Then an UnsupportedError is raised if the donor changes the effect
    of positions on the prompt, or if branches of one sequence are requested and the model does not allow them.
    alone: the placements without the donor, if they are known.
    """
    with stage("constant token"), exclusive(model):
        tokens, start = torch.from_numpy(ids[:1]).to(input_device(model)), ids.shape[1] - plan.length
        if not start:
            return read_placements(model, tokens, plan, edits)
        if alone is None:
            alone = read_placements(model, tokens[:, start:], plan, edits)
        _require_rotation_only(model, alone)  # first: a table of positions may be too short for a donor
        if any(isinstance(edit, Branches) and not edit.apart for edit in edits) and branches_of(model).apart:
            raise UnsupportedError(
                "branches of one sequence are not defined for this model: a document changes the states of what "
                "follows even if no query sees it, or the model counts its tokens itself", where=type(model).__name__,
                remedy=f"use --edit {BRANCHED}:apart",
            )  # fmt: skip
        placements = read_placements(model, tokens, plan, edits, start)
        _require_same_rotation(model, plan, placements, alone)
        if (gap := prefix_difference(model)) > AGREE.of(model.dtype):
            raise _not_defined(
                model,
                f"the states of a text change with what follows it, by up to {gap:.2g} of the largest: a layer depends "
                "on later tokens, or on the number of tokens that are read",
            )
    return placements


def _require_rotation_only(model: PreTrainedModel, placements: list[Placement]) -> None:
    """Raise if positions do more than rotate queries and keys."""
    reason = next((place.stays for place in placements if place.stays is not None), None)
    if any(place.temperature is not None for place in placements):
        reason = SCALED_QUERIES
    if reason is not None:
        raise _not_defined(model, reason)


def _require_same_rotation(
    model: PreTrainedModel, plan: Plan, after: list[Placement], alone: list[Placement]
) -> None:  # fmt: skip
    """Raise if prompts are rotated differently after a donor: then not only the visible keys would differ."""
    turns = [
        float((more - more[:1]).sin().abs().max())
        for a, b in zip(after, alone, strict=True)
        if a.rotation is not None and b.rotation is not None and len(a.rotation.first) == len(b.rotation.first) > 0
        for more in [a.rotation.angles - b.rotation.angles]
    ]
    if any(place.temperature is not None for place in after):
        raise _not_defined(model, SCALED_QUERIES)
    if max(turns, default=0.0) > 3 * gap_bound(plan, model.dtype):  # at up to three times the positions
        raise _not_defined(model, "its rotation changes with the length of what it reads")


def _not_defined(model: PreTrainedModel, reason: str) -> UnsupportedError:
    what = f"a borrowed context is not defined for this model: {reason}"
    return UnsupportedError(what, where=type(model).__name__, remedy=MEASURE_INSTEAD)
