"""The sink profile: how much late queries attend to each of the first positions, how wide the sink is, and whether the
origin covers it."""

from __future__ import annotations

import numpy as np
import xarray as xr
from jaxtyping import Float64, Int64

from posleak.axes import HEAD, PROMPT

TIMES, LEAST = 5.0, 0.02
"""A position belongs to a sink if late queries attend to it this many times as much as to an ordinary far key, and
this much of all their attention."""

AFTER = 8
"""So many keys after the origin are looked at to see whether it is wide enough."""


def sink_width(
    profile: Float64[np.ndarray, "*cells first"], ordinary: Float64[np.ndarray, "*cells"]
) -> Int64[np.ndarray, "*cells"]:
    """How many first positions the sink takes: up to the last one that stands out; 0 where none does."""
    out = (profile > LEAST) & (profile > TIMES * np.nan_to_num(ordinary)[..., None])
    places = np.arange(1, profile.shape[-1] + 1)
    return np.asarray(np.where(out, places, 0).max(-1), dtype=np.int64)


def narrow_layers(data: xr.Dataset, origin: int) -> dict[int, int]:
    """Attention calls where the sink goes on behind the origin, each with the width of the origin that would do.

    There the keys m … m+7 get more than 5 times the attention of ordinary ones, and over 0.02 of all, in the mean over
    prompts and heads. A width at the end of what was looked at means that or more.
    """
    profile, ordinary = (data[name].mean((PROMPT, HEAD), skipna=True).values for name in ("profile", "ordinary"))
    wide = {}
    for layer, (row, far) in enumerate(zip(profile, np.nan_to_num(ordinary), strict=True)):
        last = len(row) - AFTER
        sticks_out = [
            bool(row[m : m + AFTER].sum() > LEAST and row[m : m + AFTER].mean() > TIMES * far)
            for m in range(origin, last + 1)
        ]
        if sticks_out and sticks_out[0]:
            wide[layer] = origin + (sticks_out.index(False) if False in sticks_out else last - origin)
    return wide
