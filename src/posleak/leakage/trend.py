"""How a power goes with depth: least-squares slopes against relative depth, 0 the first layer and 1 the last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from posleak.arrays import Array

from .sampled import Cells, Sampled, combined


def depth_slope(powers: Sampled, layers: Sequence[int] | None = None) -> tuple[Sampled, Sampled]:
    """Slope of the powers [L], of some layers or of all, in nats² per relative depth; and divided by their mean."""
    count = powers.value.shape[-1]
    chosen = np.arange(count) if layers is None else np.asarray(layers)
    depth, some = chosen / (count - 1), powers if layers is None else powers[chosen]
    plain = combined(lambda y: slope(y, depth), some)
    return plain, plain / combined(lambda y: y.mean(-1), some)


def slope(y: Float64[np.ndarray, "*cells L"], x: Float64[np.ndarray, "L"]) -> Cells:
    """Of y against x."""
    centred = x - x.mean()
    found: Array = (y @ centred) / (centred @ centred)
    return found
