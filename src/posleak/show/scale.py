"""Ranges of axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from posleak.leakage import Estimate


def power_range(powers: Mapping[str, Estimate], names: Iterable[str]) -> list[float]:
    """Return the range of an axis that fits the values; bands that are much wider are cut off."""
    cells = np.concatenate([np.stack([powers[n].value, powers[n].low, powers[n].high]) for n in names], axis=-1)
    if not np.isfinite(cells[0]).any():
        return [0.0, 1.0]
    least, most, low, high = np.nanmin(cells[0]), np.nanmax(cells[0]), np.nanmin(cells), np.nanmax(cells)
    height = max(most - min(least, 0.0), 1e-12)
    return [float(max(low, least - height / 2) - 0.05 * height), float(min(high, most + height) + 0.05 * height)]
