"""The rows of the logit matrix that are sampled: measured queries, late reference queries, and offsets.

The default plan is part of the definition of the results (docs/definitions.md), and is recorded with every result.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from posleak.axes import MIN_LENGTH
from posleak.defaults import DEFAULT_ORIGIN as DEFAULT_ORIGIN
from posleak.errors import InputError

MAX_LENGTH, MAX_DENSITY = 2**24, 64
"""Upper limits against mistyped values."""

PROFILE_POSITIONS = 16
"""The mean attention of references is kept for the origin and for this number of positions after it."""


@dataclass(frozen=True)
class Plan:
    """Sampled positions of prompts of `length` tokens.

    queries     measured positions i, all before the last quarter
    references  late positions r, in the last quarter
    offsets     δ at which log-attention is compared
    origin      m: number of leading tokens treated as the origin
    """

    length: int
    queries: tuple[int, ...]
    references: tuple[int, ...]
    offsets: tuple[int, ...]
    origin: int = DEFAULT_ORIGIN

    def __post_init__(self) -> None:
        rows = self.rows
        if self.origin < 1 or list(rows) != sorted(set(rows)) or rows[0] < self.origin or rows[-1] >= self.length:
            raise InputError(
                "the rows of a plan must be increasing positions after the origin, queries before references",
                where="plan", got=f"queries {self.queries}, references {self.references}, origin {self.origin}",
                expected=f"positions {self.origin} … {self.length - 1}",
            )  # fmt: skip

    @property
    def rows(self) -> tuple[int, ...]:
        """All sampled positions in increasing order: queries, then references."""
        return (*self.queries, *self.references)


def default_plan(length: int, density: int = 1, origin: int = DEFAULT_ORIGIN) -> Plan:
    """Return the default plan for prompts of `length` tokens.

    queries m + 1, m + 3, … below 16 and 20 log-spaced ones up to 3N/4 − 1; 15 references in the last quarter; two
    offsets per octave below N/2

    density: multiplies the number of log-spaced queries, of references, and of offsets per octave
    origin: number of leading tokens treated as the origin
    """
    for name, value, most in (("length", length, MAX_LENGTH), ("density", density, MAX_DENSITY)):
        if value > most:
            raise InputError(f"{name} is too large", where=name, got=value, expected=f"at most {most:,}")
    if density < 1:
        raise InputError("density is too small", where="density", got=density, expected="at least 1")
    if length < MIN_LENGTH:
        raise InputError(
            "the prompt is too short: its last quarter must contain the reference queries",
            where="length", got=f"length {length}", expected=f"at least {MIN_LENGTH} tokens",
            remedy=f"use --length {MIN_LENGTH} or more; results are stable from about 256 on",
        )  # fmt: skip
    if not 1 <= origin <= length // 4:
        raise InputError(
            "invalid number of origin tokens", where="--origin", got=origin,
            expected=f"1 to {length // 4}, a quarter of the prompt",
        )  # fmt: skip
    quarter = 3 * length // 4
    spaced = np.rint(np.geomspace(max(16, origin + 1), quarter - 1, 20 * density)).astype(int)
    references = np.rint(np.linspace(quarter, length - 1, 15 * density)).astype(int)
    return Plan(
        length=length,
        queries=tuple(range(origin + 1, 16, 2)) + tuple(int(i) for i in np.unique(spaced)),
        references=tuple(int(r) for r in np.unique(references)),
        offsets=_offsets(length // 2, density),
        origin=origin,
    )


def _offsets(below: int, density: int) -> tuple[int, ...]:
    """Return 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, …: each octave 2^a is divided into 2·density steps where it has room."""
    offsets, octave = {0, 1}, 2
    while octave < below:
        offsets.update(octave + (octave * step) // (2 * density) for step in range(2 * density))
        octave *= 2
    return tuple(sorted(offset for offset in offsets if offset < below))
