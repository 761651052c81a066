"""Figures for print (PNG and SVG, through matplotlib) and every table as CSV and Parquet, in one folder."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from posleak.runs.folder import write_atomically
from posleak.runs.spec import slug

from .figures import RATIOS, defined, every_part
from .sources import Source
from .tables import tables
from .view import View, view

COLOURS = {
    "total": "#40474e", "mask": "#0072b2", "drift": "#e69f00", "sink": "#009e73", "residual": "#a05a00",
    "scaling": "#d55e00",
}  # fmt: skip
STYLE: Any = {
    "font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6, "axes.titlesize": 9,
    "legend.frameon": False, "lines.linewidth": 1.2, "svg.fonttype": "none", "svg.hashsalt": "posleak",
}  # fmt: skip
FORMATS: dict[str, dict[str, Any]] = {"png": {"dpi": 300}, "svg": {"metadata": {"Date": None}}}
WIDTH = 6.75
"""Inches: the text width of most two-column papers."""


def write_assets(found: Sequence[Source], folder: Path) -> list[Path]:
    """All figures and tables; the files that were written."""
    written = list[Path]()
    for name, rows in tables(found).items():
        table = pa.Table.from_pylist(rows)
        written.append(_write(folder / f"{name}.csv", partial(_csv, table)))
        written.append(_write(folder / f"{name}.parquet", partial(_parquet, table)))
    for name, figure in figures([view(source, 0) for source in found]):
        written += [_write(folder / f"{name}.{suffix}", partial(_save, figure, suffix)) for suffix in FORMATS]
    return written


def _write(path: Path, write: Callable[[Path], object]) -> Path:
    write_atomically(path, write)
    return path


def _csv(table: pa.Table, path: Path) -> None:
    pyarrow.csv.write_csv(table, path)


def _parquet(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd")


def _save(figure: Figure, suffix: str, path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, format=suffix, bbox_inches="tight", **FORMATS[suffix])


def figures(views: Sequence[View]) -> Iterator[tuple[str, Figure]]:
    """Names and figures; with several runs the name ends with the run's."""
    for k, each in enumerate(views):
        suffix = f"-{k + 1}-{slug(each.label)}" if len(views) > 1 else ""
        yield f"depth{suffix}", _figure(depth, each, (WIDTH, 4.6))
        yield f"heads{suffix}", _figure(heads, each, (WIDTH, 1.2 + 0.09 * each.heads["shape"][0]))
        if each.origin is not None:
            yield f"position-0{suffix}", _figure(position_0, each, (WIDTH, 2.4))
        if each.edits:
            yield f"edits{suffix}", _figure(edits, each, (WIDTH, 0.8 + 0.42 * len(each.edits)))
    if len(views) > 1:
        with matplotlib.rc_context(STYLE):
            figure = _blank((WIDTH, 0.8 + 0.5 * len(views)))
            balance(figure, views)
        yield "balance", figure


def _figure(draw: Callable[[Figure, View], None], each: View, size: tuple[float, float]) -> Figure:
    with matplotlib.rc_context(STYLE):
        figure = _blank(size)
        draw(figure, each)
    return figure


def _blank(size: tuple[float, float]) -> Figure:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def depth(figure: Figure, each: View) -> None:
    """Powers per layer with bands; below it stabilisation and attention to position 0."""
    rows = figure.add_gridspec(2, 1, height_ratios=[3, 2])
    top, below = figure.add_subfigure(rows[0]), figure.add_subfigure(rows[1])
    axes = top.subplots()
    for name in ("total", *each.parts):
        _band(axes, each.layers["all"]["power"][name], COLOURS[name], name)
    axes.axhline(0, color="#999999", linewidth=0.5)
    axes.set(
        xlabel="layer", ylabel="power, nats²", title=_text(f"{each.label}, n = {each.prompts}, {each.length} tokens")
    )
    axes.legend(ncols=5, loc="upper right")
    left, right = below.subplots(1, 2)
    _band(left, each.layers["all"]["stabilisation"], COLOURS["sink"], no_effect=1.0)
    left.axhline(1, color="#999999", linewidth=0.5, linestyle=":")
    left.set(xlabel="layer", ylabel="stabilisation, times", yscale="log")
    _band(right, each.layers["sink_attention"], COLOURS["sink"])
    right.set(xlabel="layer", ylabel="attention to position 0", ylim=(0, 1))


def _band(axes: Axes, estimate: dict[str, Any], colour: str, label: str | None = None, no_effect: float = 0.0) -> None:
    value, low, high = (np.array(estimate[name], dtype=float) for name in ("value", "low", "high"))
    x = np.arange(len(value))
    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(x, value, color=colour, label=label)
    clear = (low > no_effect) | (high < no_effect)
    axes.plot(x[clear], value[clear], ".", color=colour, markersize=4)
    axes.plot(x[~clear], value[~clear], "o", color=colour, markersize=3, markerfacecolor="white")


def heads(figure: Figure, each: View) -> None:
    """Maps of the powers of each component; a ring where the interval contains 0, hatched where not defined."""
    layers, count = each.heads["shape"]
    numbers = np.frombuffer(base64.b64decode(each.heads["numbers"]), dtype="<f8").reshape(-1, layers, count, 3)
    columns = [tuple(column) for column in each.heads["columns"]]
    names = ("total", *each.parts)
    for axes, name in zip(figure.subplots(1, len(names), sharey=True), names, strict=True):
        value, low, high = np.moveaxis(numbers[columns.index(("all", "power", name))], -1, 0)
        ramp = matplotlib.colors.LinearSegmentedColormap.from_list(name, ["#f5f6f7", COLOURS[name]])
        top = float(np.nanquantile(value, 0.98)) if np.isfinite(value).any() else 1.0
        shown = axes.imshow(value, cmap=ramp, norm=matplotlib.colors.PowerNorm(0.5, 0, max(top, 1e-12)), aspect="auto")
        unsure = np.argwhere((low <= 0) & (high >= 0))
        axes.plot(unsure[:, 1], unsure[:, 0], "o", color="#777777", markersize=1.5, markerfacecolor="none", linewidth=0)
        axes.patch.set(hatch="/////", edgecolor="#bbbbbb", facecolor="white")
        axes.set(title=name, xlabel="head")
        axes.xaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(shown, ax=axes, location="bottom", extend="both", shrink=0.9, label="nats²")
    figure.axes[0].set_ylabel("layer")


def position_0(figure: Figure, each: View) -> None:
    assert each.origin is not None
    left, right = figure.subplots(1, 2)
    path, portrait = each.origin["trajectory"], each.origin["portrait"]
    x = np.arange(len(path["norm"]))
    left.fill_between(x, portrait["norm"][0], portrait["norm"][2], color=COLOURS["mask"], alpha=0.25, linewidth=0)
    left.plot(x, portrait["norm"][1], color=COLOURS["mask"], label=f"{portrait['n']} first tokens")
    left.plot(x, path["norm"], color=COLOURS["sink"], label=_text(path["spelled"] or f"token {path['token']}"))
    left.plot(x, path["body"]["median_norm"], ":", color="#777777", label="ordinary positions")
    left.set(yscale="log", xlabel="depth", ylabel="norm of the state")
    left.legend()
    among = {name: np.array(portrait["among"][name], dtype=float) for name in ("value", "low", "high")}
    right.fill_between(x, among["low"], among["high"], color=COLOURS["mask"], alpha=0.25, linewidth=0)
    right.plot(x, among["value"], color=COLOURS["mask"], label="among first tokens")
    right.plot(x, path["body"]["alike"], ":", color="#777777", label="among ordinary positions")
    right.set(ylim=(-0.05, 1.05), xlabel="depth", ylabel="mean cosine")
    right.legend(loc="lower right")


def edits(figure: Figure, each: View) -> None:
    """The forest plot: power after / before, on a log axis around no change."""
    axes = figure.subplots()
    seen = set[str]()
    for row, edit in enumerate(each.edits):
        for rank, (name, cell) in enumerate(defined(edit["ratios"]).items()):
            colour, y = COLOURS[name.split(",")[0]], row + 0.18 * (rank - (len(edit["ratios"]) - 1) / 2)
            ends = [max(x, 0.02) for x in (cell["low"], cell["high"]) if x is not None]
            axes.plot(ends, [y] * len(ends), color=colour, linewidth=1)
            mark = "<" if cell["value"] < 0.02 else "D" if "early" in name else "o"
            face = colour if "early" in name else "white"
            label = name if name not in seen else None
            axes.plot(max(cell["value"], 0.02), y, mark, color=colour, markerfacecolor=face, markersize=4, label=label)
            seen.add(name)
    axes.axvline(1, color="#777777", linewidth=0.6, linestyle=":")
    axes.set(xscale="log", xlabel="power after / before the edit", ylim=(len(each.edits) - 0.4, -0.6))
    low, high = axes.get_xlim()
    ticks = {x: text for x, text in RATIOS.items() if low <= x <= high}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(each.edits)), [edit["about"] for edit in each.edits])
    if seen:
        figure.legend(ncols=4, loc="outside upper center")


def balance(figure: Figure, views: Sequence[View]) -> None:
    """Shares of mask, drift and sink of each run, with intervals."""
    axes, seen = figure.subplots(), set[str]()
    for rank, name in enumerate(every_part(views)):
        for k, each in enumerate(views):
            if name not in each.parts:
                continue
            cell, y = each.answer["all"][name], k + 0.2 * (rank - 1)
            if cell["value"] is None:
                axes.text(0, y, "n.s.", fontsize=6, color=COLOURS[name], va="center")
                continue
            axes.plot([cell["low"], cell["high"]], [y, y], color=COLOURS[name])
            axes.plot(
                cell["value"], y, "o", color=COLOURS[name], markersize=4, label=name if name not in seen else None
            )
            seen.add(name)
    axes.axvline(0, color="#777777", linewidth=0.6)
    axes.set(xlabel="share of the total, all queries", ylim=(len(views) - 0.5, -0.5))
    axes.set_yticks(range(len(views)), [_text(each.label) for each in views])
    axes.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    if seen:
        figure.legend(ncols=4, loc="outside upper center")


def _text(text: str) -> str:
    """matplotlib reads $ as mathematics: shown as it is. Characters that no font has are spelled out."""
    return re.sub(r"([$\\])", r"\\\1", "".join(c if c.isprintable() else repr(c)[1:-1] for c in text))
