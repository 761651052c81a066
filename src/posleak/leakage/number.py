"""One row of a table: an estimate with the labels that say what it is an estimate of.

Every table that is written or shown has rows of this form. Usual labels:

    quantity, component   what is estimated: power, share, …; and of which component
    unit
    queries               all, early or reference
    layer, call, head     the model's layer id, the index of the attention call, the head
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .sampled import Estimate

POWER_UNIT, SHARE_UNIT = "nats²", "1"


@dataclass(frozen=True)
class LabelledEstimate:
    """An estimate of one cell or of many, and its labels in the order of the columns."""

    estimate: Estimate
    labels: dict[str, Any] = field(default_factory=dict)

    def cells(self, *axes: str) -> Iterator[LabelledEstimate]:
        """Yield one labelled estimate per cell; its indices, named by `axes`, come before the other labels."""
        for index in np.ndindex(np.shape(self.estimate.value)):
            yield LabelledEstimate(self.estimate[index], dict(zip(axes, index, strict=True)) | self.labels)

    def as_row(self, columns: Sequence[str] | None = None, **labels: Any) -> dict[str, Any]:
        """Return labels, value, low, high and n as one row.

        columns: the names and the order of the columns; absent labels are None. labels: added in front.
        """
        cell = self.estimate
        ends = {"value": float(cell.value), "low": float(cell.low), "high": float(cell.high), "n": cell.n}
        row = {**labels, **self.labels, **ends}
        return row if columns is None else {name: row.get(name) for name in columns}

    @classmethod
    def from_row(cls, row: Mapping[Any, Any]) -> LabelledEstimate:
        """Read a row as `as_row` or JSON have it: there null stands for NaN."""
        value, low, high = (np.asarray(row[end], dtype=np.float64) for end in ("value", "low", "high"))
        labels = {name: label for name, label in row.items() if name not in ("value", "low", "high", "n")}
        return cls(Estimate(value, low, high, int(row["n"])), labels)
