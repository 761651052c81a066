"""Figures for print (PNG and SVG, by matplotlib) and every table as CSV and Parquet, in one folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from posleak.analyses.origin.origin import Origin
from posleak.analyses.trace.trace import Ladder
from posleak.arrays import Array
from posleak.errors import StorageError
from posleak.files import remove_leftovers, write_atomically
from posleak.metrics.agreement import Agreement, RankAgreement
from posleak.metrics.table import Metrics
from posleak.runs.software import slug
from posleak.show import plots
from posleak.show.colours import LIGHT
from posleak.show.plots import WIDTH, as_text, drawn, write

from . import metric_figures as papers
from .compare import Comparison
from .figures import LEAST_RATIO, RATIO_TICKS, every_part, forest_rows, lent_to
from .tables import tables
from .view import RunView

PALE, GREY, LIGHT_GREY = "#f5f6f7", "#777777", "#bbbbbb"
FIGURES = ("png", "svg")
TABLES: dict[str, Callable[[pa.Table, Path], None]] = {
    "csv": pyarrow.csv.write_csv, "parquet": partial(pq.write_table, compression="zstd"),
}  # fmt: skip


def write_assets(views: Sequence[RunView], compared: Comparison | None, folder: Path) -> list[Path]:
    """Write all figures and tables, and return their paths; remove temporary files of a killed process."""
    remove_leftovers(folder, lambda name: name.endswith((*FIGURES, *TABLES)))
    written = list[Path]()
    for name, rows in tables(views, compared).items():
        table = pa.Table.from_pylist(rows)
        written += [_write(folder / f"{name}.{suffix}", partial(save, table)) for suffix, save in TABLES.items()]
    for name, figure in figures(views):
        written += [_write(folder / f"{name}.{suffix}", partial(write, figure, suffix)) for suffix in FIGURES]
    return written


def _write(path: Path, write: Callable[[Path], object]) -> Path:
    try:
        write_atomically(path, write)
    except StorageError as error:
        remedy = None if error.remedy is None else error.remedy.replace("--out", "--assets")
        raise StorageError(error.what, where=error.where, got=error.got, remedy=remedy) from error
    return path


def figures(views: Sequence[RunView]) -> Iterator[tuple[str, Figure]]:
    """Yield names and figures; with several runs a name ends with the run's index and label."""
    for k, view in enumerate(views):
        suffix = f"-{k + 1}-{slug(view.label)}" if len(views) > 1 else ""
        for name, figure in _run_figures(view):
            yield f"{name}{suffix}", figure
    if len(views) > 1:
        yield "balance", drawn(partial(balance, views=views), (WIDTH, 0.8 + 0.5 * len(views)))


def _run_figures(view: RunView) -> Iterator[tuple[str, Figure]]:
    layers, summary, trace = len(view.summary.layer_names), view.summary, view.trace
    power, attention = summary.layers["all"], summary.layer_sink_attention
    yield "depth", drawn(lambda f: plots.depth(f, power, attention, view.parts, view.summary.places, view.title))
    yield "sink-profile", drawn(partial(sink_profile, view=view), (WIDTH, 1.2 + 0.09 * layers))
    if trace is not None:
        above, below = (trace.layers["all"].power, view.sources), (power.power, view.parts)
        yield "both", drawn(lambda f: plots.both(f, above, below, view.summary.places, view.title))
        if (steps := trace.ladder) is not None:
            height = 1.2 + 0.2 * len(steps.upto)
            yield "by-layer", drawn(partial(by_layer, view=view, steps=steps), (WIDTH, height))
    yield "heads", drawn(partial(heads, view=view), (WIDTH, 1.2 + 0.09 * layers))
    if view.origin is not None:
        yield "position-0", drawn(partial(position_0, origin=view.origin.record), (WIDTH, 2.4))
    if view.edited:
        yield "edits", drawn(partial(edits, view=view), (WIDTH, 0.8 + 0.42 * len(view.edited)))
    if view.related is not None:
        metrics, ranked = view.related.metrics, view.related.agreements
        if ranked:
            yield "agreement", agreement_figure(ranked, view.title)
        if metrics.frames:
            yield "frames", drawn(partial(frames, view=view, metrics=metrics), (WIDTH, 2.0))
        if curves := papers.curves_of(metrics.depths):
            yield "states", drawn(partial(states, metrics=metrics), (WIDTH, 1.7 * ((len(curves) + 1) // 2)))


def agreement_figure(ranked: Mapping[str, Agreement], title: str) -> Figure:
    """Return maps of ρ over heads and over layers, one below the other."""
    height = sum(0.9 + 0.16 * len(papers.grouped(ranking.rows)) for ranking in ranked.values())
    return drawn(partial(agreement, ranked=ranked, title=title), (WIDTH, height))


def agreement(figure: Figure, ranked: Mapping[str, Agreement], title: str) -> None:
    """Map ρ of each metric with the powers of the leakage, over heads and over layers."""
    ramp = LinearSegmentedColormap.from_list("rho", [LIGHT["negative"], PALE, LIGHT["here"]])
    rows = [len(papers.grouped(ranking.rows)) + 3 for ranking in ranked.values()]
    every = figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0]
    for axes, (over, ranking) in zip(every, ranked.items(), strict=True):
        lines, columns = papers.grouped(ranking.rows), papers.leakage_of(ranking)
        for y, row in enumerate(lines):
            for x, name in enumerate(columns) if isinstance(row, str) else ():
                _cell(axes, x, y, ranking.cell(ranking.rows.index(row), name), ramp)
        axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(lines) - 0.5, -0.5))
        axes.set_xticks(range(len(columns)), columns)
        names = [papers.label(line) if isinstance(line, str) else rf"$\bf{{{papers.GROUPS[line]}}}$" for line in lines]
        axes.set_yticks(range(len(lines)), names)
        axes.tick_params(length=0, labeltop=True, labelbottom=False, labelsize=7)
        axes.spines[:].set_visible(False)
        axes.set_title(as_text(f"{title}: Spearman's ρ over {ranking.n} {over}"), fontsize=8)
    shades = matplotlib.cm.ScalarMappable(Normalize(-1, 1), ramp)
    figure.colorbar(shades, ax=every.tolist(), label="ρ", shrink=0.5, pad=0.02)


def _cell(axes: Axes, x: int, y: int, cell: RankAgreement, ramp: matplotlib.colors.Colormap) -> None:
    """One cell: a number if it is significant, else pale with a ring; a cross if ρ is not defined."""
    known = not np.isnan(cell.rho)
    text = f"{cell.rho:.2f}".replace("-", "−") if cell.clear else papers.NOT_SIGNIFICANT if known else papers.UNDEFINED
    colour = ramp((cell.rho + 1) / 2) if known else PALE
    axes.fill([x - 0.49, x + 0.49, x + 0.49, x - 0.49], [y - 0.48, y - 0.48, y + 0.48, y + 0.48], color=colour,
              alpha=1.0 if cell.clear else 0.45, linewidth=0)  # fmt: skip
    axes.text(x, y, text, ha="center", va="center", fontsize=6, color="black" if cell.clear else GREY)


def frames(figure: Figure, view: RunView, metrics: Metrics) -> None:
    """Stack the shares of the frame types by layer; a dot above a layer is filled where its type is significant."""
    axes, below = figure.subplots(), np.zeros(len(view.summary.places))
    colours = {kind: LIGHT.get(colour, LIGHT_GREY) for kind, colour in papers.FRAME_COLOURS.items()}
    for kind, name in papers.FRAME_NAMES.items():
        share = np.array([float(layer.shares[kind].value) for layer in metrics.frames])
        axes.bar(view.summary.places, share, bottom=below, color=colours[kind], label=name, width=0.85)
        below = below + np.nan_to_num(share)
    for x, layer in zip(view.summary.places, metrics.frames, strict=True):
        face = colours[layer.kind] if layer.clear else "white"
        axes.plot(x, 1.07, "o", color=colours[layer.kind], markersize=4, markerfacecolor=face)
    axes.set(xlabel="layer", ylabel="share of the anchors", title=as_text(view.title), ylim=(0, 1.14))
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    figure.legend(ncols=4, loc="outside lower center")


def states(figure: Figure, metrics: Metrics) -> None:
    """Draw metrics of the residual stream by depth, with intervals."""
    depths, curves = metrics.depths, papers.curves_of(metrics.depths)
    every = figure.subplots((len(curves) + 1) // 2, 2, squeeze=False).flat
    for axes, curve in zip(every, curves):
        cells, x = depths[curve.array], np.arange(len(depths[curve.array].value))
        axes.fill_between(x, cells.low, cells.high, color=LIGHT["run-0"], alpha=0.18, linewidth=0)
        axes.plot(x, cells.value, color=LIGHT["run-0"])
        if curve.other is not None and curve.other[0] in depths:
            axes.plot(x, depths[curve.other[0]].value, ":", color=GREY, label=curve.other[1])
            axes.legend()
        axes.set(xlabel="depth", ylabel=curve.unit, yscale="log" if curve.log else "linear", title=curve.title)
    for axes in list(figure.axes)[len(curves) :]:
        axes.set_axis_off()


def sink_profile(figure: Figure, view: RunView) -> None:
    """Map the attention of late queries to the first positions; dotted: end of the origin, bars: ends of the sinks."""
    axes, profile = figure.subplots(), view.profile
    figure.colorbar(_map(axes, profile.attention.value, "sink"), ax=axes, label="attention")
    wide = np.flatnonzero((profile.width > 0) & (profile.width <= profile.attention.value.shape[1]))
    axes.vlines(profile.width[wide] - 0.5, wide - 0.5, wide + 0.5, color="black", linewidth=2)
    axes.axvline(profile.origin - 0.5, color="black", linewidth=0.8, linestyle=":")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.set(xlabel="position", ylabel="layer", title=as_text(view.title))
    _name_layers(axes.yaxis, view.summary.layer_names)


def by_layer(figure: Figure, view: RunView, steps: Ladder) -> None:
    """Map the power left in each layer if the layers up to K have a borrowed context; bars mark the end of K."""
    axes = figure.subplots()
    figure.colorbar(_map(axes, steps.left.value, "earlier"), ax=axes, label="nats²")
    rows = np.arange(1, len(steps.upto) - 1)
    ends = np.searchsorted(view.summary.layer_ids, steps.upto[1:-1], side="right")
    axes.vlines(ends - 0.5, rows - 0.5, rows + 0.5, color="black", linewidth=2)
    axes.set(xlabel="layer", ylabel="context lent to", title=as_text(view.title))
    _name_layers(axes.xaxis, view.summary.layer_names)
    axes.set_yticks(range(len(steps.upto)), lent_to(steps))


def _name_layers(axis: Axis, names: Sequence[str]) -> None:
    """Label the rows or columns of a map with the names of the layers."""
    axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axis.set_major_formatter(lambda x, _: names[int(x)] if 0 <= x < len(names) else "")


def _map(axes: Axes, value: Array, name: str, top: float | None = None) -> AxesImage:
    """Values in the colour of `name`, on a square-root scale from 0."""
    ramp = LinearSegmentedColormap.from_list(name, [PALE, LIGHT[name]])
    most = float(np.nanmax([*value.flat, 1e-12])) if top is None else max(top, 1e-12)
    return axes.imshow(value, cmap=ramp, norm=PowerNorm(0.5, 0, most), aspect="auto")


def heads(figure: Figure, view: RunView) -> None:
    """Map the power of each component; a ring where the interval contains 0, hatched where it is not defined."""
    names = ("total", *view.parts)
    for axes, name in zip(figure.subplots(1, len(names), sharey=True), names, strict=True):
        power = view.head_columns["all", "power", name]
        value = power.value
        image = _map(axes, value, name, float(np.nanquantile(value, 0.98)) if np.isfinite(value).any() else 1.0)
        layer, head = np.nonzero((power.low <= 0) & (power.high >= 0))
        axes.plot(head, layer, "o", color=GREY, markersize=1.5, markerfacecolor="none", linewidth=0)
        axes.patch.set(hatch="/////", edgecolor=LIGHT_GREY, facecolor="white")
        axes.set(title=name, xlabel="head")
        axes.xaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(image, ax=axes, location="bottom", extend="both", shrink=0.9, label="nats²")
    figure.axes[0].set_ylabel("layer")
    _name_layers(figure.axes[0].yaxis, view.summary.layer_names)


def position_0(figure: Figure, origin: Origin) -> None:
    """Draw norm and mean cosine of the states of first tokens by depth, next to those of ordinary positions."""
    left, right = figure.subplots(1, 2)
    path, many, body = origin.trajectory, origin.portrait, origin.trajectory.body
    x = np.arange(len(path.norm))
    left.fill_between(x, many.norm[0], many.norm[2], color=LIGHT["mask"], alpha=0.25, linewidth=0)
    left.plot(x, many.norm[1], color=LIGHT["mask"], label=f"{many.n} first tokens")
    left.plot(x, path.norm, color=LIGHT["sink"], label=as_text(path.spelled or f"token {path.token}"))
    left.plot(x, body.median_norm, ":", color=GREY, label="ordinary positions")
    left.set(yscale="log", xlabel="depth", ylabel="norm of the state")
    left.legend()
    right.fill_between(x, many.among.low, many.among.high, color=LIGHT["mask"], alpha=0.25, linewidth=0)
    right.plot(x, many.among.value, color=LIGHT["mask"], label="among first tokens")
    right.plot(x, body.alike, ":", color=GREY, label="among ordinary positions")
    right.set(ylim=(-0.05, 1.05), xlabel="depth", ylabel="mean cosine")
    right.legend(loc="lower right")


def edits(figure: Figure, view: RunView) -> None:
    """Draw power after / before each edit, on a log axis."""
    axes, named = figure.subplots(), set[str]()
    for y, kept in forest_rows(view):
        ratio, early, colour = kept.ratio, kept.queries == "early", LIGHT[kept.component]
        if not np.isnan(ratio.low):
            axes.plot(np.maximum([ratio.low, ratio.high], LEAST_RATIO), [y, y], color=colour, linewidth=1)
        marker = "<" if ratio.value < LEAST_RATIO else "D" if early else "o"
        face, name = colour if early else "white", None if kept.name in named else kept.name
        x = np.maximum(ratio.value, LEAST_RATIO)
        axes.plot(x, y, marker, color=colour, markerfacecolor=face, markersize=4, label=name)
        named.add(kept.name)
    axes.axvline(1, color=GREY, linewidth=0.6, linestyle=":")
    axes.set(xscale="log", xlabel="power after / before the edit", ylim=(len(view.edited) - 0.4, -0.6))
    low, high = axes.get_xlim()
    ticks = {x: text for x, text in RATIO_TICKS.items() if low <= x <= high}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xticks([], minor=True)
    names = [as_text(edited.about) for _, edited in view.edited]
    axes.set_yticks(range(len(names)), names)
    if named:
        figure.legend(ncols=4, loc="outside upper center")


def balance(figure: Figure, views: Sequence[RunView]) -> None:
    """Draw the shares of the parts of each run, with intervals."""
    axes, named = figure.subplots(), set[str]()
    for rank, name in enumerate(every_part(views)):
        for k, view in enumerate(views):
            if (share := view.summary.model["all"].share.get(name)) is None:
                continue
            y, colour = k + 0.2 * (rank - 1), LIGHT[name]
            if np.isnan(share.value):
                axes.text(0, y, "n.s.", fontsize=6, color=colour, va="center")
                continue
            axes.plot([share.low, share.high], [y, y], color=colour)
            axes.plot(share.value, y, "o", color=colour, markersize=4, label=None if name in named else name)
            named.add(name)
    axes.axvline(0, color=GREY, linewidth=0.6)
    axes.set(xlabel="share of the total, all queries", ylim=(len(views) - 0.5, -0.5))
    axes.set_yticks(range(len(views)), [as_text(view.label) for view in views])
    axes.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    if named:
        figure.legend(ncols=4, loc="outside upper center")
