"""The main results of one run: powers and shares of the whole model, and the trend of the residual over depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from posleak.leakage import Estimate, Jackknife
from posleak.leakage.contrast import depth_slope
from posleak.leakage.summary import Decomposition

from .run import Run


@dataclass(frozen=True)
class Balance:
    """The main results of a run.

    numbers    powers and shares of the whole model, for early and for all queries
    slopes     of the residual's power over relative depth (0 at the first layer, 1 at the last), in nats²: over `all`
               layers, and separately over `sliding` and `global` layers if the model has both
    relative   slopes divided by the mean over layers
    """

    numbers: dict[str, Decomposition]
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
        trends = {kind: depth_slope(powers, layers) for kind, layers in kinds.items() if len(layers) > 1}
        return cls(
            numbers=run.summary.model,
            slopes={kind: pair[0].estimate for kind, pair in trends.items()},
            relative={kind: pair[1].estimate for kind, pair in trends.items()},
            sink_attention=jackknife.mean(np.nanmean(run.data["profile"].values[..., 0], axis=(1, 2))).estimate,
            prompts=run.prompts,
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.numbers, "slope": self.slopes, "relative_slope": self.relative,
            "sink_attention": self.sink_attention, "prompts": self.prompts,
        }  # fmt: skip
