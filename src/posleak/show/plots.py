"""Figures by matplotlib for print and for notebooks. Open markers: the interval contains the value of no effect."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from posleak.arrays import Array
from posleak.errors import InputError
from posleak.files import write_atomically

from .colours import LIGHT, LINE, power_range

if TYPE_CHECKING:
    from .estimates import HasInterval, HasShares

    Powers = tuple[Mapping[str, HasInterval], Sequence[str]]

STYLE: Any = {
    "font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6, "axes.titlesize": 9,
    "legend.frameon": False, "lines.linewidth": 1.2, "svg.fonttype": "none", "svg.hashsalt": "posleak",
}  # fmt: skip
FORMATS: dict[str, dict[str, Any]] = {
    "png": {"dpi": 300}, "svg": {"metadata": {"Date": None}}, "pdf": {"metadata": {"CreationDate": None}},
}  # fmt: skip
WIDTH = 6.75
"""Width of figures in inches: the text width of most two-column papers."""


@dataclass(frozen=True, repr=False, eq=False)
class Picture:
    """A figure that notebooks display and `save` writes; `figure` is the matplotlib figure."""

    figure: Figure
    title: str

    def save(self, path: str | Path) -> Path:
        """Write the figure as PNG, SVG or PDF, by the suffix of the path, and return the path."""
        place = Path(path)
        suffix = place.suffix.lower().removeprefix(".")
        if suffix not in FORMATS:
            raise InputError(
                "unknown figure format", where="save", got=str(place), expected=" | ".join(f".{f}" for f in FORMATS)
            )
        write_atomically(place, lambda temporary: write(self.figure, suffix, temporary))
        return place

    def _repr_html_(self) -> str:
        """Return the figure as SVG."""
        stream = io.BytesIO()
        write(self.figure, "svg", stream)
        text = stream.getvalue().decode()
        return text[text.index("<svg") :]

    def __repr__(self) -> str:
        return f"Picture({self.title}; .save(path) writes PNG, SVG or PDF)"


def write(figure: Figure, suffix: str, place: Any) -> None:
    """Write a figure into a file or a stream."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(place, format=suffix, bbox_inches="tight", **FORMATS[suffix])


def drawn(draw: Callable[[Figure], None], size: tuple[float, float] = (WIDTH, 4.6)) -> Figure:
    """Return a new figure in posleak's style, drawn by `draw`."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure)
    return figure


def depth(
    figure: Figure, numbers: HasShares, sink_attention: HasInterval, parts: Sequence[str], x: Array, title: str
) -> None:  # fmt: skip
    """Draw powers by layer above stabilisation and attention to position 0; x: coordinates of the layers."""
    rows = figure.add_gridspec(2, 1, height_ratios=[3, 2])
    top, below = figure.add_subfigure(rows[0]), figure.add_subfigure(rows[1])
    axes = top.subplots()
    powers(axes, numbers.power, ("total", *parts), x)
    axes.set(xlabel="layer", ylabel="power, nats²", title=as_text(title))
    left, right = below.subplots(1, 2)
    band(left, numbers.stabilisation, LIGHT["sink"], x, no_effect=1.0)
    left.axhline(1, color=LINE, linewidth=0.5, linestyle=":")
    left.set(xlabel="layer", ylabel="stabilisation, times", yscale="log")
    band(right, sink_attention, LIGHT["sink"], x)
    right.set(xlabel="layer", ylabel="attention to position 0", ylim=(0, 1))


def both(figure: Figure, sources: Powers, parts: Powers, x: Array, title: str) -> None:
    """Draw powers by source above powers by part, over one axis of layers; each is given as powers and names."""
    above, below = figure.subplots(2, 1, sharex=True)
    powers(above, sources[0], ("total", *sources[1]), x)
    powers(below, parts[0], ("total", *parts[1]), x)
    above.set(ylabel="by source, nats²", title=as_text(title))
    below.set(xlabel="layer", ylabel="by part, nats²")


def powers(axes: Axes, estimates: Mapping[str, HasInterval], names: Sequence[str], x: Array) -> None:
    """Draw several components by layer."""
    for name in names:
        band(axes, estimates[name], LIGHT[name], x, name)
    axes.axhline(0, color=LINE, linewidth=0.5)
    axes.set(ylim=power_range(estimates, names))
    axes.legend(ncols=5, loc="upper right")


def band(
    axes: Axes, estimate: HasInterval, colour: str, x: Array, label: str | None = None, no_effect: float = 0.0
) -> None:  # fmt: skip
    """Draw one quantity by layer, with its interval."""
    value, low, high = estimate.value, estimate.low, estimate.high
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(x, value, color=colour, label=label)
    clear = (low > no_effect) | (high < no_effect)
    axes.plot(x[clear], value[clear], ".", color=colour, markersize=4)
    axes.plot(x[~clear], value[~clear], "o", color=colour, markersize=3, markerfacecolor="white")


def as_text(text: str) -> str:
    """Return text with $ and unprintable characters escaped, since matplotlib reads $ as mathematics."""
    return re.sub(r"([$\\])", r"\\\1", "".join(c if c.isprintable() else repr(c)[1:-1] for c in text))


def trade(figure: Figure, points: Sequence[tuple[str, str, HasInterval, HasInterval]], title: str) -> None:
    """Draw change of leakage against change of loss, with intervals; a point is (name, group, leakage, loss).

    Points are numbered, and the legend lists their names. Both axes are linear around 0 and logarithmic beyond the
    median absolute value, so that small and large changes are visible.
    """
    axes = figure.subplots()
    groups = list(dict.fromkeys(group for _, group, _, _ in points))
    pairs = [(loss, leakage) for _, _, leakage, loss in points]
    for scale, of in ((axes.set_xscale, 0), (axes.set_yscale, 1)):
        sizes = [abs(float(pair[of].value)) for pair in pairs if pair[of].value != 0]
        scale("symlog", linthresh=float(np.median(sizes)) if sizes else 1.0, linscale=1.5)
    for number, (name, group, leakage, loss) in enumerate(points, start=1):
        x, y = (np.nan_to_num([[abs(e.value - e.low)], [abs(e.value - e.high)]]) for e in (loss, leakage))
        axes.errorbar(
            float(loss.value), float(leakage.value), xerr=x, yerr=y, fmt="o", markersize=3.5, elinewidth=0.8,
            color=LIGHT[f"run-{groups.index(group) % 6}"], label=as_text(f"{number}  {name}"),
        )  # fmt: skip
    for line in (axes.axhline, axes.axvline):
        line(0, color=LINE, linewidth=0.5)
    axes.set(xlabel="change of loss, nats per token", ylabel="change of leakage, nats²", title=as_text(title))
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), handlelength=1.0, fontsize=7)
    figure.draw_without_rendering()  # fixes the positions of the axes
    number_points(axes, [(float(loss.value), float(leakage.value)) for loss, leakage in pairs])


def number_points(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
    """Label points 1, 2, 3 …, each at the candidate place that is farthest from other points and labels."""
    places = [axes.transData.transform(point) for point in points]
    taken = [np.asarray(place) for place in places]
    for number, place in enumerate(places, start=1):
        around = [
            place + radius * np.array([math.cos(angle), math.sin(angle)])
            for radius in (10, 18, 26)
            for angle in np.arange(1, 9) * math.pi / 4
        ]
        best = max(around, key=lambda spot: min(12.0, *(float(np.hypot(*(spot - other))) for other in taken)))
        taken.append(best)
        offset = (best - place) * 72 / axes.figure.dpi
        axes.annotate(
            str(number), points[number - 1], tuple(offset), textcoords="offset points", ha="center", va="center",
            fontsize=6,
        )  # fmt: skip
