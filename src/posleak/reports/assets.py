"""Figures for print (PNG and SVG, by matplotlib) and every table as CSV and Parquet, in one folder.

Most figures for print are drawn from those of the page, so that each figure is defined once.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure

from posleak.analyses.circuit.circuit import Circuit
from posleak.errors import StorageError
from posleak.files import remove_leftovers, write_atomically
from posleak.metrics.agreement import Agreement
from posleak.runs.software import slug
from posleak.show import plots
from posleak.show.colours import LIGHT
from posleak.show.plots import WIDTH, as_text, drawn, write

from . import circuit_figures, metric_figures
from .figures import Figure as PageFigure
from .page import Page
from .tables import tables
from .view import RunView

GREYS = {"paper": "white", "wash": "#f5f6f7", "faint": "#bbbbbb", "muted": "#777777", "ink": "black"}
"""Colours of the page that are not in LIGHT."""

MARKERS = {"circle": "o", "diamond": "D", "square": "s", "triangle-left": "<"}
DASHES = {"solid": "-", "dot": ":"}
FIGURES = ("png", "svg")
TABLES: dict[str, Callable[[pa.Table, Path], None]] = {
    "csv": pyarrow.csv.write_csv, "parquet": partial(pq.write_table, compression="zstd"),
}  # fmt: skip


def write_assets(page: Page, folder: Path) -> list[Path]:
    """Write all figures and tables, and return their paths; remove temporary files of a killed process."""
    remove_leftovers(folder, lambda name: name.endswith((*FIGURES, *TABLES)))
    written = list[Path]()
    for name, rows in tables(page.views, page.comparison).items():
        table = pa.Table.from_pylist(rows)
        written += [_write(folder / f"{name}.{suffix}", partial(save, table)) for suffix, save in TABLES.items()]
    for name, figure in figures(page):
        written += [_write(folder / f"{name}.{suffix}", partial(write, figure, suffix)) for suffix in FIGURES]
    return written


def _write(path: Path, write: Callable[[Path], object]) -> Path:
    try:
        write_atomically(path, write)
    except StorageError as error:
        remedy = None if error.remedy is None else error.remedy.replace("--out", "--assets")
        raise StorageError(error.what, where=error.where, got=error.got, remedy=remedy) from error
    return path


def figures(page: Page) -> Iterator[tuple[str, Figure]]:
    """Yield names and figures; with several runs a name ends with the run's index and label."""
    for k, run in enumerate(page.runs):
        suffix = f"-{k + 1}-{slug(run.view.label)}" if len(page.runs) > 1 else ""
        for name, figure in _run_figures(run.view, run.data["figures"]):
            yield f"{name}{suffix}", figure
    if "balance-all" in page.comparison_figures:
        height = 0.8 + 0.5 * len(page.runs)
        yield "balance", printed({"all queries": page.comparison_figures["balance-all"]}, height)


def _run_figures(view: RunView, of_page: Mapping[str, PageFigure]) -> Iterator[tuple[str, Figure]]:
    layers, summary, trace, title = len(view.summary.layer_names), view.summary, view.trace, view.title
    power, attention = summary.layers["all"], summary.layer_sink_attention
    yield "depth", drawn(lambda f: plots.depth(f, power, attention, view.parts, summary.places, title))
    yield "sink-profile", printed({title: of_page["sink-profile"]}, 1.2 + 0.09 * layers)
    if trace is not None:
        above, below = (trace.layers["all"].power, view.by_source), (power.power, view.parts)
        yield "both", drawn(lambda f: plots.both(f, above, below, summary.places, title))
        if trace.ladder is not None:
            yield "by-layer", printed({title: of_page["ladder"]}, 1.2 + 0.2 * len(trace.ladder.upto))
    yield "heads", drawn(partial(heads, view=view), (WIDTH, 1.2 + 0.09 * layers))
    if view.origin is not None:
        panels = {"norm of the state at position 0": "norm", "mean cosine of first tokens": "alike"}
        yield "position-0", printed({name: of_page[key] for name, key in panels.items()}, 2.4, columns=2)
    if view.edited:
        yield "edits", printed({title: of_page["edits"]}, 0.8 + 0.42 * len(view.edited))
    if view.circuit is not None:
        yield from _circuit_figures(view.circuit, of_page, title)
    if view.related is not None:
        if view.related.agreements:
            yield "agreement", agreement_figure(view.related.agreements, of_page, title)
        if view.related.metrics.frames:
            yield "frames", printed({title: of_page["frames"]}, 2.0)
        if curves := metric_figures.curves_of(view.related.metrics.depths):
            states = {curve.title: of_page[f"by-depth-{curve.array}"] for curve in curves}
            yield "states", printed(states, 1.7 * ((len(curves) + 1) // 2), columns=2)


def _circuit_figures(
    circuit: Circuit, of_page: Mapping[str, PageFigure], title: str
) -> Iterator[tuple[str, Figure]]:  # fmt: skip
    if "circuit-removed" in of_page:
        yield "circuit-removed", printed({f"{title}: share removed": of_page["circuit-removed"]}, 2.8)
    if (carrier := circuit.carrier) is not None:
        curves = {
            f"depth {depth}": circuit_figures.curve(carrier, depth) for depth in circuit_figures.some_depths(carrier)
        }
        yield "circuit-curve", printed(curves, 1.9 * ((len(curves) + 1) // 2), columns=2)
        shares = {f"{title}: positional share of the variance": of_page["circuit-share"]}
        if "circuit-spectrum" in of_page:
            shares |= {"share of the positional variance by direction": of_page["circuit-spectrum"]}
        yield "circuit-carrier", printed(shares, 2.0 * len(shares))
        yield "circuit-alignment", printed({title: of_page["circuit-alignment"]}, 4.4)
    for name in ("circuit-erasure", "circuit-loss"):
        if name in of_page:
            yield name, printed({title: of_page[name]}, 1.0 + 0.3 * len(circuit_figures.erasures(circuit.erasure)))


def agreement_figure(agreements: Mapping[str, Agreement], of_page: Mapping[str, PageFigure], title: str) -> Figure:
    """Map ρ of each metric with the powers of the leakage, over heads and over layers, one below the other."""
    maps = {
        f"{title}: Spearman's ρ over {ranking.n} {over}": of_page[f"agreement-{over}"]
        for over, ranking in agreements.items()
    }
    rows = [len(metric_figures.grouped(ranking.rows)) for ranking in agreements.values()]
    return printed(maps, sum(0.9 + 0.16 * count for count in rows), height_ratios=[count + 3 for count in rows])


def printed(
    panels: Mapping[str, PageFigure], height: float, columns: int = 1, height_ratios: Sequence[float] | None = None
) -> Figure:
    """Draw figures of the page, given by their titles, as the panels of one figure."""

    def draw(figure: Figure) -> None:
        rows = (len(panels) + columns - 1) // columns
        every = list(figure.subplots(rows, columns, squeeze=False, height_ratios=height_ratios).flat)
        for axes, (title, panel) in zip(every, panels.items()):
            _panel(axes, panel)
            axes.set_title(as_text(title))
            if panel["layout"].get("showlegend", True) and axes.get_legend_handles_labels()[1]:
                figure.legend(ncols=4, loc="outside lower center") if len(panels) == 1 else axes.legend()
        for axes in every[len(panels) :]:
            axes.set_axis_off()

    return drawn(draw, (WIDTH, height))


def _panel(axes: Axes, panel: PageFigure) -> None:
    """Draw the traces of a plotly figure, its lines at no effect, and its axes."""
    below: Any = 0.0
    for trace in panel["data"]:
        if trace["type"] == "heatmap":
            _map(axes, trace)
        elif trace["type"] == "bar":
            axes.bar(trace["x"], trace["y"], bottom=below, color=_colour(trace["marker"]["color"]), label=trace["name"])
            below = below + np.nan_to_num(np.array(trace["y"], dtype=float))
        else:
            _scatter(axes, trace)
    for shape in panel["layout"].get("shapes", ()):
        place = (axes.axhline, "y0") if shape["y0"] == shape["y1"] else (axes.axvline, "x0")
        dash = DASHES[shape["line"].get("dash", "solid")]
        place[0](shape[place[1]], color=_colour(shape["line"]["color"]), linewidth=0.8, linestyle=dash)
    for name in ("x", "y"):
        _axis(axes, name, panel["layout"][f"{name}axis"])


def _scatter(axes: Axes, trace: Mapping[str, Any]) -> None:
    """Draw a band, or a line, markers and error bars."""
    x, y = (np.array(trace[name], dtype=float) for name in ("x", "y"))
    if trace.get("fill"):
        axes.fill(x, y, color=_colour(trace["fillcolor"]), alpha=0.18, linewidth=0)
        return
    label = _text(trace["name"]) if trace.get("showlegend", True) else None
    if "lines" in trace["mode"]:
        line = trace["line"]
        axes.plot(x, y, color=_colour(line["color"]), linestyle=DASHES[line.get("dash", "solid")], label=label)
    if "markers" in trace["mode"]:
        marker, label = trace["marker"], label if trace["mode"] == "markers" else None
        looks = np.broadcast_arrays(marker["symbol"], marker["color"], x)[:2]
        for symbol, colour in dict.fromkeys(zip(*(each.tolist() for each in looks), strict=True)):
            at = (looks[0] == symbol) & (looks[1] == colour)
            face = "white" if symbol.endswith("-open") else _colour(colour)
            shape = MARKERS[symbol.removesuffix("-open")]
            axes.plot(x[at], y[at], shape, color=_colour(colour), markersize=4, markerfacecolor=face, label=label)
            label = None
    for name in ("error_x", "error_y"):
        if error := trace.get(name):
            ends = np.array([error["arrayminus"], error["array"]], dtype=float)
            across, up = (ends, None) if name == "error_x" else (None, ends)
            axes.errorbar(x, y, xerr=across, yerr=up, fmt="none", ecolor=_colour(error["color"]), elinewidth=1)


def _map(axes: Axes, trace: Mapping[str, Any]) -> None:
    """Draw a map, its texts and its scale."""
    z, ramp = np.array(trace["z"], dtype=float), [_colour(colour) for _, colour in trace["colorscale"]]
    x, y = (np.array(trace.get(name, range(count)), dtype=float) for name, count in zip("xy", z.shape[::-1]))
    edges = [[at[0] - 0.5, *(at[1:] + at[:-1]) / 2, at[-1] + 0.5] for at in (x, y)]
    image = axes.pcolormesh(
        *edges, z, cmap=LinearSegmentedColormap.from_list("", ramp), vmin=trace["zmin"], vmax=trace["zmax"],
        alpha=trace.get("opacity"),
    )  # fmt: skip
    if "texttemplate" in trace:
        for (row, column), text in np.ndenumerate(np.array(trace["text"])):
            axes.text(float(x[column]), float(y[row]), text, ha="center", va="center", fontsize=6)
    if trace.get("showscale", True):
        scale = trace["colorbar"]
        bar = axes.figure.colorbar(image, ax=axes, label=scale["title"]["text"], pad=0.02)
        bar.set_ticks(scale["tickvals"][::2], labels=scale["ticktext"][::2])  # a scale in print is short


def _axis(axes: Axes, name: str, settings: Mapping[str, Any]) -> None:
    """Apply title, scale, range and ticks of an axis; plotly's range of a log axis has exponents."""
    axis, log = getattr(axes, f"{name}axis"), settings.get("type") == "log"
    axes.set(**{f"{name}label": settings["title"]["text"], f"{name}scale": "log" if log else "linear"})
    if "tickvals" in settings:
        axis.set_ticks(settings["tickvals"], labels=[_text(text) for text in settings.get("ticktext", ())] or None)
        axis.set_ticks([], minor=True)
    elif settings["title"]["text"].startswith(("layer", "position", "depth")):
        axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, min_n_ticks=1))
    if "tickformat" in settings:
        axis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    if "range" in settings:
        axes.set(**{f"{name}lim": np.power(10.0, settings["range"]) if log else settings["range"]})
    if settings.get("side") == "top":
        axes.tick_params(length=0, labeltop=True, labelbottom=False, labelsize=7)


def _colour(variable: str) -> str:
    """Return the colour of a CSS variable such as `var(--mask)`, without its opacity."""
    name = variable.removeprefix("var(--").removesuffix(")").removesuffix("-band")
    return GREYS.get(name) or LIGHT[name]


def _text(escaped: str) -> str:
    """Return a label of the page, which is escaped for HTML; headings are bold."""
    heading = re.fullmatch("<b>(.*)</b>", escaped)
    return rf"$\bf{{{heading[1]}}}$" if heading else as_text(html.unescape(escaped))


def heads(figure: Figure, view: RunView) -> None:
    """Map the power of each component; a ring where the interval contains 0, hatched where it is not defined."""
    names = ("total", *view.parts)
    for axes, name in zip(figure.subplots(1, len(names), sharey=True), names, strict=True):
        power = view.head_columns["all", "power", name]
        ramp = LinearSegmentedColormap.from_list(name, [GREYS["wash"], LIGHT[name]])
        top = float(np.nanquantile(power.value, 0.98)) if np.isfinite(power.value).any() else 1.0
        image = axes.imshow(power.value, cmap=ramp, norm=PowerNorm(0.5, 0, max(top, 1e-12)), aspect="auto")
        layer, head = np.nonzero((power.low <= 0) & (power.high >= 0))
        axes.plot(head, layer, "o", color=GREYS["muted"], markersize=1.5, markerfacecolor="none", linewidth=0)
        axes.patch.set(hatch="/////", edgecolor=GREYS["faint"], facecolor="white")
        axes.set(title=name, xlabel="head")
        axes.xaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axes, location="bottom", extend="both", shrink=0.9, label="nats²")
    axis, layers = figure.axes[0].yaxis, view.summary.layer_names
    axis.set_label_text("layer")
    axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axis.set_major_formatter(lambda y, _: layers[int(y)] if 0 <= y < len(layers) else "")
