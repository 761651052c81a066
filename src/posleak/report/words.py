"""Numbers as text: always with their interval, and with a mark of its own where there is none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NAN = "–"
SOURCES = {
    "mask": "the causal mask",
    "drift": "drift of the residual stream",
    "sink": "the sink at position 0",
    "scaling": "the scaling of queries by position",
}

Cell = Mapping[str, Any]
"""value, low, high: numbers, or None for what is not one."""


def percent(value: float | None) -> str:
    """`31%`, `−4%`, `0.3%`; finer than a percent only where rounding would hide the sign."""
    if value is None or math.isnan(value):
        return NAN
    digits = 1 if 0 < abs(value) < 0.005 else 0
    return _minus(f"{value:.{digits}%}".replace("-0%", "0%").replace("-0.0%", "0%").replace("0.0%", "0%"))


def number(value: float | None) -> str:
    """Three significant digits; an exponent for the very small and the very large."""
    if value is None or math.isnan(value):
        return NAN
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        mantissa, exponent = f"{value:.1e}".split("e")
        return _minus(f"{mantissa}e{int(exponent)}")
    return _minus(f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}")


def shown(value: float | None, unit: str) -> str:
    """A number of this unit: shares as percent, factors with a ×."""
    if unit.startswith("share"):
        return percent(value)
    return number(value) if unit != "times" or value is None else f"×{number(value)}"


def interval(cell: Cell, unit: str = "") -> str:
    """`(20% … 41%)`, or nothing where there is no interval."""
    if cell["low"] is None or cell["high"] is None:
        return ""
    return f"({shown(cell['low'], unit)} … {shown(cell['high'], unit)})"


def estimate(cell: Cell, unit: str = "") -> str:
    """`31% (20% … 41%)`"""
    return f"{shown(cell['value'], unit)} {interval(cell, unit)}".strip()


def unit_label(unit: str) -> str:
    """`share removed` is shown as a percentage that was `removed`."""
    return unit.removeprefix("share").strip() if unit.startswith("share") else "" if unit == "times" else unit


def lead(shares: Mapping[str, Cell]) -> str:
    """How the answer begins: which source is ahead, said only as strongly as the intervals allow."""
    names = [name for name in SOURCES if name in shares]
    if any(shares[name]["value"] is None for name in names):
        return "shows no leakage of absolute position that is clearly above noise"
    order = sorted(names, key=lambda name: -shares[name]["value"])
    first = shares[order[0]]
    ahead = [SOURCES[name] for name in order if shares[name]["high"] >= first["low"]]
    if first["low"] > 0.5:
        return f"gets its sense of absolute position mostly from {ahead[0]}"
    if len(ahead) == 1:
        return f"gets its sense of absolute position more from {ahead[0]} than from any other source"
    neither = "neither" if len(ahead) == 2 else "none of them"
    return f"gets its sense of absolute position from {' and '.join(ahead)}, {neither} clearly ahead"


def _minus(text: str) -> str:
    return text.replace("-", "−")
