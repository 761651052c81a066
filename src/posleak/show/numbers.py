"""Numbers and intervals as text; a dash where a number is not defined."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .estimates import HasEnds, HasInterval

NAN = "–"


def percent(value: Any) -> str:
    """Return `31%`, `−4%` or `0.3%`: one decimal only where the rounded value would be 0%."""
    if math.isnan(value):
        return NAN
    digits = 1 if 0 < abs(value) < 0.005 else 0
    return _minus(f"{value:.{digits}%}".replace("-0%", "0%").replace("-0.0%", "0%").replace("0.0%", "0%"))


def number(value: Any) -> str:
    """Return a number with three significant digits; very small and very large ones with an exponent."""
    if math.isnan(value):
        return NAN
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        mantissa, exponent = f"{value:.1e}".split("e")
        return _minus(f"{mantissa}e{int(exponent)}")
    return _minus(f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}")


def short(value: Any) -> str:
    """Return a number for narrow columns: two decimals without the leading zero, or one digit and an exponent."""
    if value == 0:
        return "0"
    if abs(value) < 0.005:
        return _minus(f"{value:.0e}".replace("e-0", "e-"))
    return _minus(f"{value:.2f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.2f}")


def size(value: float) -> str:
    """Return a size such as 3.3, 98.7, 810 or 25.1k."""
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def shown(value: Any, unit: str = "") -> str:
    """Return a value in its unit: shares in percent, factors with ×."""
    if unit.startswith("share"):
        return percent(value)
    return f"×{number(value)}" if unit == "times" and not math.isnan(value) else number(value)


def interval(estimate: HasEnds, unit: str = "") -> str:
    """Return `(20% … 41%)`, or an empty string if there is no interval."""
    if math.isnan(estimate.low) or math.isnan(estimate.high):
        return ""
    return f"({shown(estimate.low, unit)} … {shown(estimate.high, unit)})"


def estimate(estimate: HasInterval, unit: str = "") -> str:
    """Return a value with its interval: `0.31 (0.2 … 0.41)`, or `31% (20% … 41%)`.

    estimate    a value with its interval
    unit        "share": in percent; "times": with ×
    """
    return f"{shown(estimate.value, unit)} {interval(estimate, unit)}".strip()


def excludes_zero(estimate: HasInterval) -> bool:
    """Return whether the interval does not contain 0."""
    return bool(estimate.low > 0 or estimate.high < 0)


def formatted(estimate: HasInterval, form: str) -> str:
    """Return value and interval in a format such as `.2f`: `0.31 (0.20…0.41)`."""
    if math.isnan(estimate.value):
        return NAN
    if math.isnan(estimate.low):
        return format(estimate.value, form)
    return f"{estimate.value:{form}} ({estimate.low:{form}}…{estimate.high:{form}})"


def scientific(value: float | None) -> str:
    """Return a number with two digits and an exponent."""
    if value is None or math.isnan(value):
        return NAN
    return f"{value:.1e}" if value else "0"


def unit_label(unit: str) -> str:
    """Return the text after a value: empty for plain numbers and factors; shares are in percent already."""
    return "" if unit in ("1", "times") else unit.removeprefix("share").strip()


REMOVED = "share removed"
"""The unit of 1 − power after / power before."""


def effect(estimate: HasInterval, unit: str) -> tuple[str, str]:
    """Return the effect of a claim in two pieces, the value and the rest: `39%` and `(22% … 50%) removed`.

    A power that more than doubled is given as a factor, since `−1839% removed` is hard to read.
    """
    if unit == REMOVED and estimate.value < -1:
        ratio = 1 - estimate
        return f"grew {number(ratio.value)}", f"{interval(ratio)} times".strip()
    return shown(estimate.value, unit), f"{interval(estimate, unit)} {unit_label(unit)}".strip()


def _minus(text: str) -> str:
    return text.replace("-", "−")
