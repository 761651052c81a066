"""Colours of components and runs: the colour-blind-safe palette of Okabe and Ito, and a lighter one for dark pages."""

from __future__ import annotations

LIGHT = {
    "total": "#40474e", "mask": "#0072b2", "drift": "#e69f00", "sink": "#009e73", "residual": "#a05a00",
    "scaling": "#d55e00", "mask_without_sink": "#56b4e9", "negative": "#cc79a7",
    "earlier": "#d55e00", "here": "#56b4e9", "origin": "#a2508a", "left": "#a2508a",
    "run-0": "#0072b2", "run-1": "#d55e00", "run-2": "#009e73", "run-3": "#cc79a7", "run-4": "#6b6b00",
    "run-5": "#40474e",
}  # fmt: skip
DARK = {
    "total": "#c3cad1", "mask": "#56b4e9", "drift": "#f0b429", "sink": "#23c296", "residual": "#d99a4e",
    "scaling": "#ff8a3d", "mask_without_sink": "#9fd3f2", "negative": "#e69ac2",
    "earlier": "#ff8a3d", "here": "#9fd3f2", "origin": "#dd90c6", "left": "#dd90c6",
    "run-0": "#56b4e9", "run-1": "#ff8a3d", "run-2": "#23c296", "run-3": "#e69ac2", "run-4": "#d6d04a",
    "run-5": "#c3cad1",
}  # fmt: skip

LINE = "#999999"
"""Colour of lines that mark zero or no effect in printed figures."""

GLYPHS = {"mask": "█", "drift": "▒", "sink": "·", "scaling": "╱", "earlier": "▒", "here": "█", "origin": "·"}
"""Characters of bars in a terminal, which differ so that bars can be read without colour."""

FAINT = {"total": 0.1}
BAND = 0.17
"""Opacity of the bands of intervals."""


def style_sheet() -> str:
    """Return the colours as CSS variables: `--mask`, and `--mask-band` for its intervals."""
    return f":root {{ {_variables(LIGHT)} }}\n:root[data-theme='dark'] {{ {_variables(DARK)} }}\n"


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour}; --{name}-band: {_band(name, colour)};" for name, colour in colours.items())


def _band(name: str, colour: str) -> str:
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{FAINT.get(name, BAND)})"
