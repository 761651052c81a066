"""How a model tells positions apart, as it was seen: what it adds to logits, and what places do to its keys."""

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
    """`layers`: the kind in every attention call;  `text`: all of it in a few words, for people."""

    layers: tuple[str, ...]
    text: str

    @classmethod
    def of(cls, motion: Motion, calibration: Calibration) -> Positions:
        kinds = tuple(
            _kind(moves, motion.why, bias) for moves, bias in zip(motion.layers, calibration.biases, strict=True)
        )
        return cls(kinds, _words(kinds, calibration.numbers))


def _kind(moves: str, why: str | None, bias: str | None) -> str:
    """Of one call. Keys that turn and stay all the same are rotated, too: something acts on them after it."""
    turned = moves == "rotation" or (moves == STAYS and why != ABSOLUTE_STATES)
    table = moves == STAYS and why == ABSOLUTE_STATES
    found = [kind for kind, there in ((ROTARY, turned), (TABLE, table), (bias, bias is not None)) if there and kind]
    return " and ".join(found) or NONE


def _words(kinds: Sequence[str], numbers: Sequence[int]) -> str:
    """`rotary`; `rotary, no rotation in layers 3, 7`"""
    (most, _), *others = Counter(kinds).most_common()
    said = [most]
    for kind, _ in others:
        where = format_layers([number for number, own in zip(numbers, kinds, strict=True) if own == kind])
        said.append(f"{'no rotation' if kind == NONE and most == ROTARY else kind} in {where}")
    return ", ".join(said)
