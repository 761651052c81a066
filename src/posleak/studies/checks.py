"""A check: what was measured, by what it is judged, and why it matters."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Check:
    """`bound` is the largest value that passes; None for a number that is reported and not judged.

    `cause`: what in the model itself breaks the law, where that is known: then the instrument is right, and the law is
    not one of this model.
    """

    id: str
    value: float
    bound: float | None
    unit: str
    why: str
    cause: str | None = None

    @property
    def ok(self) -> bool:
        """NaN fails: a check that could not be made has not passed."""
        return self.bound is None or self.value <= self.bound

    def because(self, cause: str | None) -> Check:
        """A failed check with its cause, said in `why` too; anything else as it is."""
        if self.ok or cause is None:
            return self
        return replace(self, cause=cause, why=f"{self.why}. Not so here: {cause}")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}
