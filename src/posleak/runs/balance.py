"""The balance of one measurement: what is mask, what drift, what sink, and how the residual changes with depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from posleak.leakage import Estimate, Jackknife
from posleak.leakage.across import depth_slope
from posleak.leakage.summary import LeakageDecomposition

from .run import Run


@dataclass(frozen=True)
class Balance:
    """Powers and shares of the whole model, early and all queries, and the residual's slopes per relative depth.

    slopes     over `all` layers, and over `sliding` and `global` ones separately where the model has both; in nats² per
               relative depth, which is 0 at the first layer and 1 at the last
    relative   slopes divided by the mean over layers
    """

    numbers: dict[str, LeakageDecomposition]
    slopes: dict[str, Estimate]
    relative: dict[str, Estimate]
    sink_attention: Estimate
    prompts: int

    @classmethod
    def of(cls, run: Run) -> Balance:
        jackknife = Jackknife(run.prompts)
        sums = np.nanmean(run.products["all"].own["residual"], axis=1)  # [L, sums]
        powers, kinds = jackknife.inner(sums), {"all": list(range(len(sums)))}
        sliding = [layer for layer, window in enumerate(run.record.calibration.windows) if window is not None]
        if 0 < len(sliding) < len(sums):
            kinds |= {"sliding": sliding, "global": [layer for layer in kinds["all"] if layer not in sliding]}
        found = {kind: depth_slope(powers, layers) for kind, layers in kinds.items() if len(layers) > 1}
        return cls(
            numbers=run.summary.model,
            slopes={kind: pair[0].estimate for kind, pair in found.items()},
            relative={kind: pair[1].estimate for kind, pair in found.items()},
            sink_attention=jackknife.mean(np.nanmean(run.data["profile"].values[..., 0], axis=(1, 2))).estimate,
            prompts=run.prompts,
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.numbers, "slope": self.slopes, "relative_slope": self.relative,
            "sink_attention": self.sink_attention, "prompts": self.prompts,
        }  # fmt: skip
