"""A check: what was measured, by what it is judged, and why it matters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """`bound` is the largest value that passes; None for a number that is reported and not judged."""

    id: str
    value: float
    bound: float | None
    unit: str
    why: str

    @property
    def ok(self) -> bool:
        """NaN fails: a check that could not be made has not passed."""
        return self.bound is None or self.value <= self.bound

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}
