"""The sink profile: attention of late queries to the first positions, the width of the sink, and whether the origin
covers it."""

from __future__ import annotations

import numpy as np
import xarray as xr
from jaxtyping import Float64, Int64

from posleak.axes import HEAD, PROMPT

SINK_RATIO, SINK_ATTENTION = 5.0, 0.02
"""A position belongs to a sink if late queries attend to it more than SINK_RATIO times as much as to an ordinary far
key, and with more than SINK_ATTENTION of all their attention."""

KEYS_AFTER_ORIGIN = 8
"""Number of keys after the origin that are examined to decide whether the origin is wide enough."""


def sink_width(
    profile: Float64[np.ndarray, "*cells first"], ordinary: Float64[np.ndarray, "*cells"]
) -> Int64[np.ndarray, "*cells"]:
    """Return the number of leading positions up to the last one that belongs to a sink; 0 if none does."""
    in_sink = (profile > SINK_ATTENTION) & (profile > SINK_RATIO * np.nan_to_num(ordinary)[..., None])
    widths = np.arange(1, profile.shape[-1] + 1)
    return np.asarray(np.where(in_sink, widths, 0).max(-1), dtype=np.int64)


def narrow_layers(data: xr.Dataset, origin: int) -> dict[int, int]:
    """Return the attention calls whose sink extends beyond the origin, each with an origin width that would suffice.

    These are calls in which the keys m … m+7 receive on average more than 5 times the attention of an ordinary key, and
    together more than 0.02 of all attention, in the mean over prompts and heads. A width at the end of the profile is a
    lower bound.
    """
    profile, ordinary = (data[name].mean((PROMPT, HEAD), skipna=True).values for name in ("profile", "ordinary"))
    widths = {}
    for call, (row, far) in enumerate(zip(profile, np.nan_to_num(ordinary), strict=True)):
        last = len(row) - KEYS_AFTER_ORIGIN
        after = [row[m : m + KEYS_AFTER_ORIGIN] for m in range(origin, last + 1)]
        in_sink = [bool(keys.sum() > SINK_ATTENTION and keys.mean() > SINK_RATIO * far) for keys in after]
        if in_sink and in_sink[0]:
            widths[call] = origin + (in_sink.index(False) if False in in_sink else last - origin)
    return widths
