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

HOMES = {
    "sinks": "attention.Sinks", "toeplitz": "logits.Toeplitz", "positions": "logits.Positions",
    "frames": "attention.Frames", "wavelets": "attention.Wavelets", "rollout": "attention.Rollout",
    "massive": "stream.Massive", "valley": "stream.Valley", "probe": "stream.Probe",
}  # fmt: skip
"""Meters that look at the passes of the measurement itself."""

BESIDE = ("inputs", "shift")
"""Those that read short prompts of their own: natural text and repeated tokens; all positions shifted, in bfloat16."""

OWN: dict[str, type[Meter]] = {}
"""Meters of plugins."""


def register(meter: type[Meter]) -> None:
    """Let `--metrics NAME` use this meter. Its classmethod `of(plan)` makes it."""
    if meter.name in (*HOMES, *BESIDE, ALL, NONE):
        raise InputError("posleak has metrics of this name", where=meter.__module__, got=meter.name,
                         remedy="choose another name")  # fmt: skip
    OWN[meter.name] = meter


def parse_metrics(asked: str | Iterable[str]) -> tuple[str, ...]:
    """`all`, `none`, or names, separated by commas -> names in one order, each once."""
    load_plugins()
    known = (*HOMES, *BESIDE, *OWN)
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
        if name in OWN:
            made.append(OWN[name].of(plan))
        elif name in HOMES:
            module, _, kind = HOMES[name].partition(".")
            made.append(getattr(import_module(f"posleak.metrics.{module}"), kind).of(plan))
    return made
