"""The kind of position encoding of a model, as observed: biases on logits, and the effect of positions on keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from posleak.axes import format_layers

from .calibration import Calibration
from .placement import ABSOLUTE_STATES, STAYS, Motion

ROTARY, TABLE, NONE = "rotary", "table of positions", "none"


@dataclass(frozen=True)
class Positions:
    """The position encoding. layers: its kind in every attention call;  text: a summary, such as `rotary`"""

    layers: tuple[str, ...]
    text: str

    @classmethod
    def of(cls, motion: Motion, calibration: Calibration) -> Positions:
        """Derive the position encoding from the motion of keys and from the biases that calibration observed."""
        kinds = tuple(
            _kind(moves, motion.why, bias) for moves, bias in zip(motion.layers, calibration.biases, strict=True)
        )
        return cls(kinds, _summary(kinds, calibration.numbers))


def _kind(moves: str, why: str | None, bias: str | None) -> str:
    """Return the kind of one call. Keys that are changed after their rotation cannot be moved, but are rotary too."""
    rotary = moves == "rotation" or (moves == STAYS and why != ABSOLUTE_STATES)
    table = moves == STAYS and why == ABSOLUTE_STATES
    kinds = [kind for kind, present in ((ROTARY, rotary), (TABLE, table), (bias, bias is not None)) if present and kind]
    return " and ".join(kinds) or NONE


def _summary(kinds: Sequence[str], layer_ids: Sequence[int]) -> str:
    """Return a summary, such as `rotary` or `rotary, no rotation in layers 3, 7`."""
    (most, _), *others = Counter(kinds).most_common()
    clauses = [most]
    for kind, _ in others:
        where = format_layers([layer for layer, own in zip(layer_ids, kinds, strict=True) if own == kind])
        clauses.append(f"{'no rotation' if kind == NONE and most == ROTARY else kind} in {where}")
    return ", ".join(clauses)
