"""Names that `--metrics` accepts. This module does not import torch, so that invalid names are rejected quickly."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

from posleak.errors import InputError, did_you_mean
from posleak.plugins import load_plugins

if TYPE_CHECKING:
    from posleak.probe import Plan

    from .meter import Meter

ALL, NONE = "all", "none"

METER_CLASSES = {
    "sinks": "attention.SinkMeter", "toeplitz": "logits.ToeplitzMeter", "positions": "logits.PositionMeter",
    "frames": "attention.FrameMeter", "wavelets": "attention.WaveletMeter", "rollout": "attention.RolloutMeter",
    "massive": "stream.MassiveMeter", "valley": "stream.ValleyMeter", "probe": "stream.ProbeMeter",
}  # fmt: skip
"""Meters that read the forward passes of the measurement: name -> module and class."""

SHORT_PROMPT_METRICS = ("inputs", "shift")
"""Metrics that read short prompts of their own: natural text and repeated tokens; shifted positions, in bfloat16."""

PLUGIN_METERS: dict[str, type[Meter]] = {}
"""Meters registered by plugins, by name."""


def register(meter: type[Meter]) -> None:
    """Make a meter available as `--metrics NAME`; its classmethod `of(plan)` constructs it."""
    if meter.name in (*METER_CLASSES, *SHORT_PROMPT_METRICS, ALL, NONE):
        raise InputError("this name belongs to a metric of posleak", where=meter.__module__, got=meter.name,
                         remedy="choose another name")  # fmt: skip
    PLUGIN_METERS[meter.name] = meter


def parse_metrics(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names in `all`, `none` or comma-separated text, each once, in a fixed order; reject unknown names."""
    load_plugins()
    known = (*METER_CLASSES, *SHORT_PROMPT_METRICS, *PLUGIN_METERS)
    texts = [part for text in ([given] if isinstance(given, str) else given) for part in str(text).split(",")]
    names = {text.strip() for text in texts if text.strip() and text.strip() != NONE}
    for name in names - {ALL, *known}:
        raise InputError(
            "unknown metrics", where=f"--metrics {name}", got=name,
            remedy=did_you_mean(name, (ALL, NONE, *known)),
        )  # fmt: skip
    return tuple(known) if ALL in names else tuple(name for name in known if name in names)


def make_meters(names: Iterable[str], plan: Plan) -> list[Meter]:
    """Construct the meters of these names that read the measurement's own passes, for prompts of this plan."""
    meters = []
    for name in names:
        if name in PLUGIN_METERS:
            meters.append(PLUGIN_METERS[name].of(plan))
        elif name in METER_CLASSES:
            module, _, kind = METER_CLASSES[name].partition(".")
            meters.append(getattr(import_module(f"posleak.metrics.{module}"), kind).of(plan))
    return meters
