"""A check: a measured value, the bound that it must not exceed, and the reason why it matters."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from posleak.typed import Number


class DoctorVerdict(Enum):
    """What failed checks mean for the results."""

    SOUND = "sound"
    """Every check passed."""
    BY_DESIGN = "by design"
    """The results are correct. The model breaks a law on purpose, and the check names the cause."""
    WRONG = "wrong"
    """A check failed without a known cause: results would be wrong."""


MARKS = {DoctorVerdict.SOUND: "✓", DoctorVerdict.BY_DESIGN: "!", DoctorVerdict.WRONG: "✗"}
NOT_JUDGED = "·"


@dataclass(frozen=True)
class Check:
    """One check.

    bound   the largest value that passes; None for a value that is reported only
    why     the property that is checked, as a sentence
    cause   the property of the model that breaks the law, if known: the failure is then not an error of posleak
    """

    id: str
    value: Number
    bound: float | None
    unit: str
    why: str
    cause: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the check passed; NaN does not pass."""
        return self.bound is None or self.value <= self.bound

    @property
    def verdict(self) -> DoctorVerdict:
        if self.ok:
            return DoctorVerdict.SOUND
        return DoctorVerdict.WRONG if self.cause is None else DoctorVerdict.BY_DESIGN

    @property
    def mark(self) -> str:
        """One glyph: passed, broken by design, failed, or reported only."""
        return NOT_JUDGED if self.bound is None else MARKS[self.verdict]

    def because(self, cause: str | None) -> Check:
        """Return a failed check with its cause appended to `why`; a check that passed is returned unchanged."""
        if self.ok or cause is None:
            return self
        return replace(self, cause=cause, why=f"{self.why}. Not so here: {cause}")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}
