"""Beside stage 5, the neighbours' measurements: what others measure of attention and states, on the same passes.

names       what `--metrics` takes, and where a meter of your own is registered
glimpse     the rows of attention that all meters look at, computed once
meter       a meter: arrays per prompt from what passes by
attention   sinks, rollout, reference frames, heads as filters;  graphs, spectra: their arithmetic
logits      ΔR², the Toeplitz deviation;  regression: its arithmetic
stream      massive activations, the compression valley, the position probe;  ridge: its arithmetic
catalogue   every metric: its definition, source, blind spots, published values
table       the numbers of a run
agreement   which metrics rank heads as leakage and its parts do

`names` is imported without torch, so that a wrong call is refused at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from posleak.lazy import lazy

if TYPE_CHECKING:
    from .agreement import Agreement
    from .glimpse import Glimpse
    from .meter import Meter, Meters
    from .names import make_meters, parse_metrics, register
    from .table import Metrics

__getattr__ = lazy(
    __name__,
    {
        "agreement": ("Agreement",),
        "glimpse": ("Glimpse",),
        "meter": ("Meter", "Meters"),
        "names": ("make_meters", "parse_metrics", "register"),
        "table": ("Metrics",),
    },
)

__all__ = ["Agreement", "Glimpse", "Meter", "Meters", "Metrics", "make_meters", "parse_metrics", "register"]
