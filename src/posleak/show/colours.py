"""Colours of components and runs, and the range of an axis of powers: what all figures share.

The palette is the colour-blind-safe one of Okabe and Ito, with a lighter one for dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .estimates import HasInterval

LIGHT = {
    "total": "#40474e", "mask": "#0072b2", "drift": "#e69f00", "sink": "#009e73", "residual": "#a05a00",
    "scaling": "#d55e00", "mask_without_sink": "#56b4e9", "negative": "#cc79a7",
    "state": "#6b6b00", "earlier": "#d55e00", "here": "#56b4e9", "origin": "#a2508a", "left": "#949ca4",
    "run-0": "#0072b2", "run-1": "#d55e00", "run-2": "#009e73", "run-3": "#cc79a7", "run-4": "#6b6b00",
    "run-5": "#40474e",
}  # fmt: skip
DARK = {
    "total": "#c3cad1", "mask": "#56b4e9", "drift": "#f0b429", "sink": "#23c296", "residual": "#d99a4e",
    "scaling": "#ff8a3d", "mask_without_sink": "#9fd3f2", "negative": "#e69ac2",
    "state": "#d6d04a", "earlier": "#ff8a3d", "here": "#9fd3f2", "origin": "#dd90c6", "left": "#808a94",
    "run-0": "#56b4e9", "run-1": "#ff8a3d", "run-2": "#23c296", "run-3": "#e69ac2", "run-4": "#d6d04a",
    "run-5": "#c3cad1",
}  # fmt: skip

LINE = "#999999"
"""Colour of lines that mark zero or no effect in printed figures."""

GLYPHS = {
    "mask": "█", "drift": "▒", "sink": "·", "scaling": "╱", "state": "╱", "earlier": "▒", "here": "█", "origin": "·",
}  # fmt: skip
"""Characters of bars in a terminal, which differ so that bars can be read without colour."""

FAINT = {"total": 0.1}
BAND = 0.17
"""Opacity of the bands of intervals."""


def style_sheet() -> str:
    """Return the colours as CSS variables, `--mask`, and `--mask-band` for its intervals, and their uses.

    `<i class="mask">` is a swatch, and `class="u-mask"` a line below a name.
    """

    def variables(colours: dict[str, str]) -> str:
        rgb = {name: ",".join(map(str, bytes.fromhex(colour[1:]))) for name, colour in colours.items()}
        bands = {name: f"rgba({numbers},{FAINT.get(name, BAND)})" for name, numbers in rgb.items()}
        return " ".join(f"--{name}: {colour}; --{name}-band: {bands[name]};" for name, colour in colours.items())

    uses = (f"i.{name} {{ background: var(--{name}); }} .u-{name} {{ border-color: var(--{name}); }}" for name in LIGHT)
    themes = f":root {{ {variables(LIGHT)} }}\n:root[data-theme='dark'] {{ {variables(DARK)} }}\n"
    return themes + "\n".join(uses) + "\n"


def power_range(powers: Mapping[str, HasInterval], names: Iterable[str]) -> list[float]:
    """Return the range of an axis that fits the values; bands that are much wider are cut off."""
    import numpy as np  # not needed by the commands that only use the colours

    cells = np.concatenate([np.stack([powers[n].value, powers[n].low, powers[n].high]) for n in names], axis=-1)
    if not np.isfinite(cells[0]).any():
        return [0.0, 1.0]
    least, most, low, high = np.nanmin(cells[0]), np.nanmax(cells[0]), np.nanmin(cells), np.nanmax(cells)
    height = max(most - min(least, 0.0), 1e-12)
    return [float(max(low, least - height / 2) - 0.05 * height), float(min(high, most + height) + 0.05 * height)]
