"""The balance of one measurement: what is mask, what drift, what sink, and how the residual goes with depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from posleak.leakage import Bootstrap, Estimate, Summary, summarise
from posleak.leakage.power import Array, unbiased
from posleak.leakage.summary import Grams, Numbers


@dataclass(frozen=True)
class Balance:
    """Powers and shares of the whole model, early and all queries, and the residual's slopes per relative depth.

    slopes: `all` layers, and `sliding` and `global` ones apart where the model has both; in nats² per relative depth,
    0 the first layer and 1 the last, and relative: divided by the mean over layers.
    """

    numbers: dict[str, Numbers]
    slopes: dict[str, Estimate]
    relative: dict[str, Estimate]
    sink_attention: Estimate
    prompts: int

    @classmethod
    def of(cls, data: xr.Dataset, windows: Sequence[int | None] = (), seed: int = 0) -> Balance:
        """windows: of each attention call, None for global ones; they tell the two kinds of layers apart."""
        summary: Summary = summarise(data, seed)
        bootstrap = Bootstrap.of(data.sizes["prompt"], seed)
        powers = np.nanmean(Grams.of(data, names=("residual",)).own["residual"], axis=1)  # [L, B, B]
        kinds = {"all": np.arange(len(powers))}
        sliding = np.array([window is not None for window in windows], dtype=bool)
        if sliding.any() and not sliding.all():
            kinds |= {"sliding": np.flatnonzero(sliding), "global": np.flatnonzero(~sliding)}
        found = {kind: depth_slope(powers, layers, bootstrap) for kind, layers in kinds.items() if len(layers) > 1}
        return cls(
            numbers=summary.model,
            slopes={kind: pair[0] for kind, pair in found.items()},
            relative={kind: pair[1] for kind, pair in found.items()},
            sink_attention=bootstrap.mean(np.nanmean(data["sink_attention"].values, axis=(1, 2))),
            prompts=data.sizes["prompt"],
        )

    def as_dict(self) -> dict[str, Any]:
        powers = {
            q: {"power": n.power, "share": n.share, "stabilisation": n.stabilisation} for q, n in self.numbers.items()
        }
        return {
            **powers, "slope": self.slopes, "relative_slope": self.relative, "sink_attention": self.sink_attention,
            "prompts": self.prompts,
        }  # fmt: skip


def depth_slope(powers: Array, layers: NDArray[np.int64], bootstrap: Bootstrap) -> tuple[Estimate, Estimate]:
    """Least-squares slope of the powers of these layers [L, B, B] against relative depth; and divided by their mean."""
    depth = layers / (len(powers) - 1)
    value, samples = unbiased(powers[layers]), bootstrap.inner(powers[layers])
    plain = _estimate(slope(value, depth), slope(samples, depth), bootstrap)
    return plain, _estimate(slope(value, depth) / value.mean(), slope(samples, depth) / samples.mean(-1), bootstrap)


def _estimate(value: Array, samples: Array, bootstrap: Bootstrap) -> Estimate:
    low, high = bootstrap.interval(samples)
    return Estimate(np.asarray(value), low, high, bootstrap.prompts)


def slope(y: Array, x: Array) -> Array:
    """Of y [..., L] against x [L]."""
    centred = x - x.mean()
    return (y @ centred) / (centred @ centred)
