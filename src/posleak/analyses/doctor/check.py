"""A check: what was measured, the bound that it is judged by, and why it matters."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from posleak.typed import Number


class DoctorVerdict(Enum):
    """What failed checks mean for the numbers."""

    SOUND = "sound"
    """Every check passed."""
    BY_DESIGN = "by design"
    """The numbers are right. The model breaks a law on purpose, and the check names the cause."""
    WRONG = "wrong"
    """A check failed without a known cause: the numbers would be wrong."""


MARKS = {DoctorVerdict.SOUND: "✓", DoctorVerdict.BY_DESIGN: "!", DoctorVerdict.WRONG: "✗"}
NOT_JUDGED = "·"


@dataclass(frozen=True)
class Check:
    """`bound` is the largest value that passes; None for a number that is reported and not judged.

    `cause`: what in the model itself breaks the law, where that is known. The law then does not hold for this model,
    and the failed check does not mean that posleak measures wrongly.
    """

    id: str
    value: Number
    bound: float | None
    unit: str
    why: str
    cause: str | None = None

    @property
    def ok(self) -> bool:
        """NaN fails: a check that could not be made has not passed."""
        return self.bound is None or self.value <= self.bound

    @property
    def verdict(self) -> DoctorVerdict:
        if self.ok:
            return DoctorVerdict.SOUND
        return DoctorVerdict.WRONG if self.cause is None else DoctorVerdict.BY_DESIGN

    @property
    def mark(self) -> str:
        """One glyph: passed, broken by design, failed, or only measured."""
        return NOT_JUDGED if self.bound is None else MARKS[self.verdict]

    def because(self, cause: str | None) -> Check:
        """A failed check with its cause, which is added to `why`; a check that passed stays as it is."""
        if self.ok or cause is None:
            return self
        return replace(self, cause=cause, why=f"{self.why}. Not so here: {cause}")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}
