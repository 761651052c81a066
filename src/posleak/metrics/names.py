"""What `--metrics` takes: names of meters. Read without torch, so that a wrong name is refused at once."""

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
"""Meters that look at the passes of the measurement itself."""

SHORT_PROMPT_METRICS = ("inputs", "shift")
"""Those that read short prompts of their own: natural text and repeated tokens; all positions shifted, in bfloat16."""

PLUGIN_METERS: dict[str, type[Meter]] = {}
"""Meters of plugins."""


def register(meter: type[Meter]) -> None:
    """Let `--metrics NAME` use this meter. Its classmethod `of(plan)` makes it."""
    if meter.name in (*METER_CLASSES, *SHORT_PROMPT_METRICS, ALL, NONE):
        raise InputError("posleak has metrics of this name", where=meter.__module__, got=meter.name,
                         remedy="choose another name")  # fmt: skip
    PLUGIN_METERS[meter.name] = meter


def parse_metrics(asked: str | Iterable[str]) -> tuple[str, ...]:
    """`all`, `none`, or names, separated by commas -> names in one order, each once."""
    load_plugins()
    known = (*METER_CLASSES, *SHORT_PROMPT_METRICS, *PLUGIN_METERS)
    texts = asked.split(",") if isinstance(asked, str) else [part for text in asked for part in str(text).split(",")]
    names = {text.strip() for text in texts if text.strip() and text.strip() != NONE}
    for name in names - {ALL, *known}:
        raise InputError(
            "unknown metrics", where=f"--metrics {name}", got=name,
            remedy=did_you_mean(name, (ALL, NONE, *known)),
        )  # fmt: skip
    return tuple(known) if ALL in names else tuple(name for name in known if name in names)


def make_meters(names: Iterable[str], plan: Plan) -> list[Meter]:
    """The meters of these names that look at the measurement's own passes, ready for prompts of this plan."""
    made = []
    for name in names:
        if name in PLUGIN_METERS:
            made.append(PLUGIN_METERS[name].of(plan))
        elif name in METER_CLASSES:
            module, _, kind = METER_CLASSES[name].partition(".")
            made.append(getattr(import_module(f"posleak.metrics.{module}"), kind).of(plan))
    return made
