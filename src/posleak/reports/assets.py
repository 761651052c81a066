"""Figures for print (PNG and SVG, through matplotlib) and every table as CSV and Parquet, in one folder."""

from __future__ import annotations

import base64
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
from matplotlib.figure import Figure

from posleak.arrays import Array
from posleak.errors import StorageError
from posleak.files import remove_leftovers, write_atomically
from posleak.metrics.agreement import Agreement, RankAgreement
from posleak.runs.software import slug
from posleak.show import plots
from posleak.show.colours import LIGHT
from posleak.show.plots import HEIGHT, WIDTH, as_text, drawn, write

from .figures import RATIOS, every_part, forest_rows, lent_to
from .gather import ShownRun
from .metric_figures import (
    FRAME_COLOURS,
    FRAME_NAMES,
    GROUPS,
    UNCLEAR,
    UNDEFINED,
    curves_of,
    grouped,
    label,
    leakage_of,
)  # fmt: skip
from .related import RelatedMetrics
from .tables import tables
from .view import View, view

SUFFIXES = ("png", "svg")

TABLES: dict[str, Callable[[pa.Table, Path], None]] = {
    "csv": pyarrow.csv.write_csv, "parquet": partial(pq.write_table, compression="zstd"),
}  # fmt: skip


def write_assets(found: Sequence[ShownRun], folder: Path) -> list[Path]:
    """Write all figures and tables, and return the files; what a killed process left of such files is removed."""
    remove_leftovers(folder, lambda name: name.endswith((*SUFFIXES, *TABLES)))
    written = list[Path]()
    for name, rows in tables(found).items():
        table = pa.Table.from_pylist(rows)
        written += [_write(folder / f"{name}.{suffix}", partial(save, table)) for suffix, save in TABLES.items()]
    for name, figure in figures([view(shown, 0) for shown in found]):
        written += [_write(folder / f"{name}.{suffix}", partial(write, figure, suffix)) for suffix in SUFFIXES]
    return written


def _write(path: Path, write: Callable[[Path], object]) -> Path:
    try:
        write_atomically(path, write)
    except StorageError as error:
        remedy = None if error.remedy is None else error.remedy.replace("--out", "--assets")
        raise StorageError(error.what, where=error.where, got=error.got, remedy=remedy) from error
    return path


def figures(views: Sequence[View]) -> Iterator[tuple[str, Figure]]:
    """Names and figures; with several runs each name ends with the run's number and label."""
    for k, each in enumerate(views):
        suffix = f"-{k + 1}-{slug(each.label)}" if len(views) > 1 else ""
        yield f"depth{suffix}", _figure(depth, each)
        yield f"sink-profile{suffix}", _figure(sink_profile, each, (WIDTH, 1.2 + 0.09 * len(each.profile.width)))
        if each.trace is not None:
            yield f"both{suffix}", _figure(both, each)
            if each.trace.ladder is not None:
                yield f"by-layer{suffix}", _figure(by_layer, each, (WIDTH, 1.2 + 0.2 * len(each.trace.ladder.upto)))
        yield f"heads{suffix}", _figure(heads, each, (WIDTH, 1.2 + 0.09 * each.heads["shape"][0]))
        if each.origin is not None:
            yield f"position-0{suffix}", _figure(position_0, each, (WIDTH, 2.4))
        if each.edited:
            yield f"edits{suffix}", _figure(edits, each, (WIDTH, 0.8 + 0.42 * len(each.edited)))
        if each.others is not None:
            yield from _neighbours(each, each.others, suffix)
    if len(views) > 1:
        yield "balance", drawn(lambda figure: balance(figure, views), (WIDTH, 0.8 + 0.5 * len(views)))


def _neighbours(each: View, others: RelatedMetrics, suffix: str) -> Iterator[tuple[str, Figure]]:
    """What others measure: agreement, reference frames, states by depth."""
    if others.agreements:
        yield f"agreement{suffix}", agreement_figure(others.agreements, _title(each))
    if others.frames:
        yield f"frames{suffix}", _figure(frames, each, (WIDTH, 2.0))
    if curves_of(others.depths):
        yield f"states{suffix}", _figure(states, each, (WIDTH, 1.7 * ((len(curves_of(others.depths)) + 1) // 2)))


def agreement_figure(found: Mapping[str, Agreement], title: str) -> Figure:
    """Maps of ρ, over heads and over layers, one below the other."""
    rows = [len(grouped(each.rows)) for each in found.values()]
    return drawn(lambda figure: agreement(figure, found, title), (WIDTH, 0.9 * len(rows) + 0.16 * sum(rows)))


def agreement(figure: Figure, found: Mapping[str, Agreement], title: str) -> None:
    """ρ of each metric with the powers of the leakage; a ring where the interval contains 0, a cross: not defined."""
    ramp = matplotlib.colors.LinearSegmentedColormap.from_list("rho", [LIGHT["negative"], "#f5f6f7", LIGHT["here"]])
    rows = [len(grouped(each.rows)) + 3 for each in found.values()]
    every = figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0]
    for axes, (over, each) in zip(every, found.items(), strict=True):
        lines, columns = grouped(each.rows), leakage_of(each)
        for y, row in enumerate(lines):
            for x, name in enumerate(columns) if isinstance(row, str) else ():
                part = each.cell(each.rows.index(row), name)
                _cell(axes, x, y, part, ramp)
        axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(lines) - 0.5, -0.5))
        axes.set_xticks(range(len(columns)), columns)
        names = [label(line) if isinstance(line, str) else rf"$\bf{{{GROUPS[line]}}}$" for line in lines]
        axes.set_yticks(range(len(lines)), names)
        axes.tick_params(length=0, labeltop=True, labelbottom=False, labelsize=7)
        axes.spines[:].set_visible(False)
        axes.set_title(as_text(f"{title}: Spearman's ρ over {each.n} {over}"), fontsize=8)
    shades = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(-1, 1), ramp)
    figure.colorbar(shades, ax=every.tolist(), label="ρ", shrink=0.5, pad=0.02)


def _cell(axes: Axes, x: int, y: int, part: RankAgreement, ramp: matplotlib.colors.Colormap) -> None:
    """One cell, with its number where the interval leaves out 0, pale with a ring where it does not."""
    known = not np.isnan(part.rho)
    text = f"{part.rho:.2f}".replace("-", "−") if part.clear else UNCLEAR if known else UNDEFINED
    colour = ramp((part.rho + 1) / 2) if known else "#f5f6f7"
    axes.fill([x - 0.49, x + 0.49, x + 0.49, x - 0.49], [y - 0.48, y - 0.48, y + 0.48, y + 0.48], color=colour,
              alpha=1.0 if part.clear else 0.45, linewidth=0)  # fmt: skip
    axes.text(x, y, text, ha="center", va="center", fontsize=6, color="black" if part.clear else "#777777")


def frames(figure: Figure, each: View) -> None:
    """Types of reference frames by layer; above each layer a dot, filled where its type is clear."""
    assert each.others is not None
    axes, found, below = figure.subplots(), each.others.frames, np.zeros(len(each.places))
    for kind, name in FRAME_NAMES.items():
        share = np.array([float(layer.shares[kind].value) for layer in found])
        axes.bar(each.places, share, bottom=below, color=_frame_colour(kind), label=name, width=0.85)
        below = below + np.nan_to_num(share)
    for x, layer in zip(each.places, found, strict=True):
        colour = _frame_colour(layer.kind)
        axes.plot(x, 1.07, "o", color=colour, markersize=4, markerfacecolor=colour if layer.clear else "white")
    axes.set(xlabel="layer", ylabel="share of the anchors", title=as_text(_title(each)), ylim=(0, 1.14))
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    figure.legend(ncols=4, loc="outside lower center")


def _frame_colour(kind: str) -> str:
    return LIGHT.get(FRAME_COLOURS[kind], "#bbbbbb")


def states(figure: Figure, each: View) -> None:
    """Numbers of the residual stream by depth, with their intervals."""
    assert each.others is not None
    depths = each.others.depths
    curves = curves_of(depths)
    every = figure.subplots((len(curves) + 1) // 2, 2, squeeze=False).flat
    for axes, curve in zip(every, curves):
        found = depths[curve.array]
        x = np.arange(len(found.value))
        axes.fill_between(x, found.low, found.high, color=LIGHT["run-0"], alpha=0.18, linewidth=0)
        axes.plot(x, found.value, color=LIGHT["run-0"])
        if curve.beside is not None and curve.beside[0] in depths:
            axes.plot(x, depths[curve.beside[0]].value, ":", color="#777777", label=curve.beside[1])
            axes.legend()
        axes.set(xlabel="depth", ylabel=curve.unit, yscale="log" if curve.log else "linear", title=curve.title)
    for axes in list(figure.axes)[len(curves) :]:
        axes.set_axis_off()


def _figure(draw: Callable[[Figure, View], None], each: View, size: tuple[float, float] = (WIDTH, HEIGHT)) -> Figure:
    return drawn(lambda figure: draw(figure, each), size)


def depth(figure: Figure, each: View) -> None:
    """Powers per layer with bands; below it stabilisation and attention to position 0."""
    numbers, attention = each.layers.numbers["all"], each.layers.sink_attention
    plots.depth(figure, numbers, attention, each.parts, each.places, _title(each))


def both(figure: Figure, each: View) -> None:
    """Above where position comes from, below where it is read, over one axis of layers."""
    assert each.trace is not None
    sources, parts = each.trace.layers["all"].power, each.layers.numbers["all"].power
    plots.both(figure, (sources, each.sources), (parts, each.parts), each.places, _title(each))


def _title(each: View) -> str:
    return f"{each.label}, n = {each.prompts}, {each.length} tokens"


def sink_profile(figure: Figure, each: View) -> None:
    """Attention of late queries to the first positions; dotted: end of the origin, bars: end of each layer's sink."""
    axes, profile = figure.subplots(), each.profile
    _map(figure, axes, profile.attention.value, "sink", "attention")
    wide = np.flatnonzero((profile.width > 0) & (profile.width <= profile.attention.value.shape[1]))
    axes.vlines(profile.width[wide] - 0.5, wide - 0.5, wide + 0.5, color="black", linewidth=2)
    axes.axvline(profile.origin - 0.5, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="position", ylabel="layer", title=as_text(_title(each)))
    _named(axes.yaxis, each)


def by_layer(figure: Figure, each: View) -> None:
    """Power that is left in each layer when a context is lent up to layer K; bars stand after layer K."""
    assert each.trace is not None
    assert each.trace.ladder is not None
    axes, found = figure.subplots(), each.trace.ladder
    _map(figure, axes, found.left.value, "earlier", "nats²")
    rows = np.arange(1, len(found.upto) - 1)
    ends = np.searchsorted(each.record.calibration.numbers, found.upto[1:-1], side="right")
    axes.vlines(ends - 0.5, rows - 0.5, rows + 0.5, color="black", linewidth=2)
    axes.set(xlabel="layer", ylabel="context lent to", title=as_text(_title(each)))
    _named(axes.xaxis, each)
    axes.set_yticks(range(len(found.upto)), lent_to(found))


def _named(axis: Axis, each: View) -> None:
    """Ticks of a map's axis with the names of the layers, in the place of their counts."""
    axis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axis.set_major_formatter(lambda x, _: each.names[int(x)] if 0 <= x < len(each.names) else "")


def _map(figure: Figure, axes: Axes, value: Array, name: str, unit: str) -> None:
    """In one colour, on a root scale from 0."""
    ramp = matplotlib.colors.LinearSegmentedColormap.from_list(name, ["#f5f6f7", LIGHT[name]])
    top = float(np.nanmax([*value.flat, 1e-12]))
    shown = axes.imshow(value, cmap=ramp, norm=matplotlib.colors.PowerNorm(0.5, 0, top), aspect="auto")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    figure.colorbar(shown, ax=axes, label=unit)


def heads(figure: Figure, each: View) -> None:
    """Maps of the powers of each component; a ring where the interval contains 0, hatched where not defined."""
    layers, count = each.heads["shape"]
    numbers = np.frombuffer(base64.b64decode(each.heads["numbers"]), dtype="<f8").reshape(-1, layers, count, 3)
    columns = [tuple(column) for column in each.heads["columns"]]
    names = ("total", *each.parts)
    for axes, name in zip(figure.subplots(1, len(names), sharey=True), names, strict=True):
        value, low, high = np.moveaxis(numbers[columns.index(("all", "power", name))], -1, 0)
        ramp = matplotlib.colors.LinearSegmentedColormap.from_list(name, ["#f5f6f7", LIGHT[name]])
        top = float(np.nanquantile(value, 0.98)) if np.isfinite(value).any() else 1.0
        shown = axes.imshow(value, cmap=ramp, norm=matplotlib.colors.PowerNorm(0.5, 0, max(top, 1e-12)), aspect="auto")
        unsure = np.argwhere((low <= 0) & (high >= 0))
        axes.plot(unsure[:, 1], unsure[:, 0], "o", color="#777777", markersize=1.5, markerfacecolor="none", linewidth=0)
        axes.patch.set(hatch="/////", edgecolor="#bbbbbb", facecolor="white")
        axes.set(title=name, xlabel="head")
        axes.xaxis.get_major_locator().set_params(integer=True)
        figure.colorbar(shown, ax=axes, location="bottom", extend="both", shrink=0.9, label="nats²")
    figure.axes[0].set_ylabel("layer")
    _named(figure.axes[0].yaxis, each)


def position_0(figure: Figure, each: View) -> None:
    assert each.origin is not None
    left, right = figure.subplots(1, 2)
    path, many, body = each.origin.trajectory, each.origin.portrait, each.origin.trajectory.body
    x = np.arange(len(path.norm))
    left.fill_between(x, many.norm[0], many.norm[2], color=LIGHT["mask"], alpha=0.25, linewidth=0)
    left.plot(x, many.norm[1], color=LIGHT["mask"], label=f"{many.n} first tokens")
    left.plot(x, path.norm, color=LIGHT["sink"], label=as_text(path.spelled or f"token {path.token}"))
    left.plot(x, body.median_norm, ":", color="#777777", label="ordinary positions")
    left.set(yscale="log", xlabel="depth", ylabel="norm of the state")
    left.legend()
    right.fill_between(x, many.among.low, many.among.high, color=LIGHT["mask"], alpha=0.25, linewidth=0)
    right.plot(x, many.among.value, color=LIGHT["mask"], label="among first tokens")
    right.plot(x, body.alike, ":", color="#777777", label="among ordinary positions")
    right.set(ylim=(-0.05, 1.05), xlabel="depth", ylabel="mean cosine")
    right.legend(loc="lower right")


def edits(figure: Figure, each: View) -> None:
    """The forest plot: power after / before, on a log axis around no change."""
    axes = figure.subplots()
    seen = set[str]()
    for y, _, kept in forest_rows(each):
        ratio, early, colour = kept.ratio, kept.queries == "early", LIGHT[kept.component]
        if not np.isnan(ratio.low):
            axes.plot(np.maximum([ratio.low, ratio.high], 0.02), [y, y], color=colour, linewidth=1)
        mark = "<" if ratio.value < 0.02 else "D" if early else "o"
        label = kept.name if kept.name not in seen else None
        face = colour if early else "white"
        axes.plot(np.maximum(ratio.value, 0.02), y, mark, color=colour, markerfacecolor=face, markersize=4, label=label)
        seen.add(kept.name)
    axes.axvline(1, color="#777777", linewidth=0.6, linestyle=":")
    axes.set(xscale="log", xlabel="power after / before the edit", ylim=(len(each.edited) - 0.4, -0.6))
    low, high = axes.get_xlim()
    ticks = {x: text for x, text in RATIOS.items() if low <= x <= high}
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.set_xticks([], minor=True)
    names = [as_text(result.edited.about) for result in each.edited if result.edited is not None]
    axes.set_yticks(range(len(names)), names)
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
            if np.isnan(cell.value):
                axes.text(0, y, "n.s.", fontsize=6, color=LIGHT[name], va="center")
                continue
            axes.plot([cell.low, cell.high], [y, y], color=LIGHT[name])
            label = name if name not in seen else None
            axes.plot(cell.value, y, "o", color=LIGHT[name], markersize=4, label=label)
            seen.add(name)
    axes.axvline(0, color="#777777", linewidth=0.6)
    axes.set(xlabel="share of the total, all queries", ylim=(len(views) - 0.5, -0.5))
    axes.set_yticks(range(len(views)), [as_text(each.label) for each in views])
    axes.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    if seen:
        figure.legend(ncols=4, loc="outside upper center")
