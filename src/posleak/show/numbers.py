"""Numbers as text: always with their interval, and a dash where a number is not defined."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posleak.leakage import Estimate

NAN = "–"


def percent(value: Any) -> str:
    """`31%`, `−4%`, `0.3%`; finer than a percent only where rounding would hide the sign."""
    if math.isnan(value):
        return NAN
    digits = 1 if 0 < abs(value) < 0.005 else 0
    return _minus(f"{value:.{digits}%}".replace("-0%", "0%").replace("-0.0%", "0%").replace("0.0%", "0%"))


def number(value: Any) -> str:
    """Three significant digits; an exponent for the very small and the very large."""
    if math.isnan(value):
        return NAN
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        mantissa, exponent = f"{value:.1e}".split("e")
        return _minus(f"{mantissa}e{int(exponent)}")
    return _minus(f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}")


def short(value: Any) -> str:
    """For narrow columns: two decimals without the leading zero; for small numbers one digit and an exponent."""
    if value == 0:
        return "0"
    if abs(value) < 0.005:
        return _minus(f"{value:.0e}".replace("e-0", "e-"))
    return _minus(f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}")


def size(value: float) -> str:
    """3.3, 98.7, 810, 25.1k"""
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def shown(value: Any, unit: str = "") -> str:
    """A number of this unit: shares as percent, factors with a ×."""
    if unit.startswith("share"):
        return percent(value)
    return f"×{number(value)}" if unit == "times" and not math.isnan(value) else number(value)


def interval(found: Estimate, unit: str = "") -> str:
    """`(20% … 41%)`, or nothing where there is no interval."""
    if math.isnan(found.low) or math.isnan(found.high):
        return ""
    return f"({shown(found.low, unit)} … {shown(found.high, unit)})"


def estimate(found: Estimate, unit: str = "") -> str:
    """A number with its interval as text: `0.31 (0.2 … 0.41)`, or `31% (20% … 41%)`.

    found       the number
    unit        "share": in percent; "times": with a ×
    """
    return f"{shown(found.value, unit)} {interval(found, unit)}".strip()


def formatted(found: Estimate, form: str) -> str:
    """Value and interval in one format, as in `0.31 (0.20…0.41)`; the value alone where there is no interval."""
    if math.isnan(found.value):
        return NAN
    if math.isnan(found.low):
        return format(found.value, form)
    return f"{found.value:{form}} ({found.low:{form}}…{found.high:{form}})"


REMOVED = "share removed"
"""The unit of 1 − power after / power before."""


def effect(found: Estimate, unit: str) -> tuple[str, str]:
    """A claim's effect in two pieces, the number to stress and the rest: `39%` and `(22% … 50%) removed`.

    A power that more than doubled is said to have grown so many times, since `−1839% removed` is hard to read.
    """
    if unit == REMOVED and found.value < -1:
        ratio = 1 - found
        return f"grew {number(ratio.value)}", f"{interval(ratio)} times".strip()
    label = unit.removeprefix("share").strip() if unit.startswith("share") else "" if unit == "times" else unit
    return shown(found.value, unit), f"{interval(found, unit)} {label}".strip()


def _minus(text: str) -> str:
    return text.replace("-", "−")
