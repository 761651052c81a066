"""A check: what was measured, the bound that it is judged by, and why it matters."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from posleak.typed import Number


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

    def because(self, cause: str | None) -> Check:
        """A failed check with its cause, which is added to `why`; a check that passed stays as it is."""
        if self.ok or cause is None:
            return self
        return replace(self, cause=cause, why=f"{self.why}. Not so here: {cause}")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}
