"""Figures of the section "What others measure": agreement as maps, reference frames by layer, and curves by depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Bool, Float64

from posleak.leakage import Estimate
from posleak.metrics.agreement import LEAKAGE, Agreement
from posleak.metrics.catalogue import BY_ID, Looks
from posleak.metrics.table import FRAMES, FrameVerdict
from posleak.show import numbers

from .figures import ALONE, Figure, banded, escaped, finished
from .view import View

GROUPS = {Looks.LOGITS: "logits", Looks.ATTENTION: "attention", Looks.STATES: "states"}
"""What metrics look at, in one word."""

FRAME_NAMES = {"centralized": "centralized", "distributed": "distributed", "bidirectional": "bidirectional",
               "no_frame": "none"}  # fmt: skip
FRAME_COLOURS = dict(zip(FRAMES, ("run-0", "run-1", "run-3", "faint"), strict=True))
MARK_COLOURS = FRAME_COLOURS | {"no_frame": "muted"}

UNCLEAR, UNDEFINED = "○", "×"
"""Marks of cells: the interval contains 0, or there is none; the number is not defined."""


@dataclass(frozen=True)
class Curve:
    """One curve by depth, called `name` in its legend. `beside`: an array that is drawn dotted, with its name."""

    array: str
    name: str
    title: str
    unit: str
    log: bool = False
    beside: tuple[str, str] | None = None


CURVES = (
    Curve(
        "norm_0",
        "position 0",
        "Norm of the state at position 0",
        "norm",
        log=True,
        beside=("norm_body", "median of the others"),
    ),
    Curve("spectrum_entropy", "entropy", "Entropy of the states' singular spectrum", "nats"),
    Curve("largest", "largest", "Largest activation", "|x|", log=True),
    Curve("probe_error", "error", "Error of the position probe", "tokens"),
)
"""Curves by depth that the page draws, of those that a run has."""


def metric_figures(view: View) -> dict[str, Figure]:
    """Every figure of the section by name; empty without metrics."""
    if view.others is None:
        return {}
    found = {}
    for over, each in view.others.agreements.items():
        found[f"agreement-{over}"] = agreement_map(each, leakage_of(each))
        found[f"alike-{over}"] = agreement_map(each, each.rows)
    if view.others.frames:
        found["frames"] = frames(view.others.frames, view)
    for curve in curves_of(view.others.depths):
        found[f"by-depth-{curve.array}"] = by_depth(curve, view.others.depths)
    return found


def curves_of(depths: dict[str, Estimate]) -> list[Curve]:
    """The curves that a run has numbers of."""
    return [curve for curve in CURVES if curve.array in depths and np.isfinite(depths[curve.array].value).any()]


def leakage_of(found: Agreement) -> tuple[str, ...]:
    """The columns that are powers of the leakage."""
    return tuple(name for name in found.columns if name in LEAKAGE)


def label(name: str) -> str:
    """A metric in few letters, for axes and tables of numbers; a power by its own name."""
    return BY_ID[name].label if name in BY_ID else name


def unit_of(unit: str) -> str:
    """What stands behind a value: nothing for a plain number, and of shares, which are in percent, what they are of."""
    return "" if unit == "1" else unit.removeprefix("share").strip()


def grouped(rows: Sequence[str]) -> list[str | Looks]:
    """Rows with a heading before each group of metrics that look at the same thing."""
    found = list[str | Looks]()
    for looks in Looks:
        group = [name for name in rows if name in BY_ID and BY_ID[name].looks is looks]
        found += [looks, *group] if group else []
    return found


def agreement_map(found: Agreement, columns: Sequence[str]) -> Figure:
    """ρ of metrics with `columns`, on a diverging scale around 0; pale and marked where the interval contains 0."""
    lines = grouped(found.rows)
    kept = [(y, found.rows.index(line)) for y, line in enumerate(lines) if isinstance(line, str)]
    at = [found.columns.index(name) for name in columns]
    rho, low, high = (np.full((len(lines), len(columns)), np.nan) for _ in range(3))
    for y, row in kept:
        rho[y], low[y], high[y] = found.rho[row, at], found.low[row, at], found.high[row, at]
    there = np.zeros(rho.shape, dtype=bool)
    there[[y for y, _ in kept]] = True
    hover = [[_said(found, line, name) for name in columns] for line in lines]
    clear = (low > 0) | (high < 0)
    cells: list[tuple[Any, float, str | list[list[str]]]] = [
        (clear & there, 1.0, [[_two_digits(x) for x in row] for row in rho.tolist()]),
        (~clear & np.isfinite(rho), 0.45, UNCLEAR),
        (there & ~np.isfinite(rho), 1.0, UNDEFINED),
    ]
    drawn = [(shown, opacity, text) for shown, opacity, text in cells if shown.any()]
    figure = go.Figure([_cells(np.nan_to_num(rho), *how, hover, k == 0) for k, how in enumerate(drawn)])
    names = [label(line) if isinstance(line, str) else f"<b>{GROUPS[line]}</b>" for line in lines]
    own = tuple(columns) == found.rows
    figure.update_layout(
        xaxis={"tickvals": list(range(len(columns))), "ticktext": [label(name) for name in columns], "showgrid": False,
               "side": "top", "tickangle": -60 if own else -45 if len(columns) > 5 else 0,
               "range": [-0.5, len(columns) - 0.5]},
        yaxis={"tickvals": list(range(len(lines))), "ticktext": names, "range": [len(lines) - 0.5, -0.5],
               "showgrid": False},
        showlegend=False, margin={"l": 10, "r": 10, "t": 10, "b": 10},
    )  # fmt: skip
    return finished(figure, "", "")


def _cells(
    rho: Float64[np.ndarray, "rows columns"], shown: Bool[np.ndarray, "rows columns"], opacity: float,
    text: str | list[list[str]], hover: list[list[str]], scale: bool,
) -> go.Heatmap:  # fmt: skip
    """The cells that look alike, as one trace; one of them shows the scale."""
    marks = np.where(shown, np.array(text), "").tolist()
    return go.Heatmap(
        z=np.where(shown, rho, np.nan).tolist(), zmin=-1, zmax=1, xgap=1, ygap=1, opacity=opacity, hoverongaps=False,
        colorscale=[[0, "var(--negative)"], [0.5, "var(--wash)"], [1, "var(--here)"]], text=marks,
        texttemplate="%{text}", textfont={} if isinstance(text, list) else {"color": "var(--ink)"},
        customdata=hover, hovertemplate=f"%{{customdata}}{ALONE}", showscale=scale,
        colorbar={"thickness": 10, "title": {"text": "ρ"}, "tickvals": [-1, -0.5, 0, 0.5, 1],
                  "ticktext": ["−1", "−0.5", "0", "0.5", "1"]},
    )  # fmt: skip


def _said(found: Agreement, row: str | Looks, column: str) -> str:
    """A cell in words; of a heading nothing."""
    if not isinstance(row, str):
        return ""
    part = found.cell(found.rows.index(row), column)
    value = "not defined" if np.isnan(part.rho) else f"ρ = {numbers.number(part.rho)} {interval(part.low, part.high)}"
    title, other = (BY_ID[name].title if name in BY_ID else name for name in (row, column))
    return escaped(f"{title} · {other}: {value}, n = {found.n} {found.over}")


def interval(low: float, high: float) -> str:
    """`(0.63 … 0.85)`, or that there is none."""
    missing = np.isnan(low) or np.isnan(high)
    return "(no interval)" if missing else f"({numbers.number(low)} … {numbers.number(high)})"


def _two_digits(rho: float) -> str:
    return "" if np.isnan(rho) else f"{rho:.2f}".replace("-", "−").replace("0.", ".")


def frames(found: Sequence[FrameVerdict], view: View) -> Figure:
    """Shares of the types by layer, on top of each other; above each layer a mark, filled where its type is clear."""
    x, figure = view.places.tolist(), go.Figure()
    for kind in FRAMES:
        share = [float(each.shares[kind].value) for each in found]
        said = [[name, numbers.estimate(each.shares[kind], "share")] for name, each in zip(view.names, found)]
        figure.add_trace(
            go.Bar(
                x=x, y=share, name=FRAME_NAMES[kind], marker={"color": f"var(--{FRAME_COLOURS[kind]})"},
                customdata=said,
                hovertemplate=f"layer %{{customdata[0]}}, {FRAME_NAMES[kind]}: %{{customdata[1]}}{ALONE}",
            )
        )  # fmt: skip
    figure.add_trace(
        go.Scatter(
            x=x, y=[1.06] * len(x), mode="markers", name="type", showlegend=False,
            marker={"color": [f"var(--{MARK_COLOURS[each.kind]})" for each in found], "size": 8,
                    "symbol": ["circle" if each.clear else "circle-open" for each in found],
                    "line": {"color": "var(--ink)", "width": 1}},
            customdata=[[name, each.words, numbers.estimate(each.margin, "share")]
                        for name, each in zip(view.names, found)],
            hovertemplate=f"layer %{{customdata[0]}}: %{{customdata[1]}}; margin %{{customdata[2]}}{ALONE}",
        )
    )  # fmt: skip
    figure.update_layout(
        barmode="stack", bargap=0.12,
        yaxis={"range": [0, 1.14], "tickformat": ".0%", "tickvals": [0, 0.25, 0.5, 0.75, 1], "showgrid": False},
    )  # fmt: skip
    return finished(figure, "layer", "share of the anchors")


def by_depth(curve: Curve, depths: dict[str, Estimate]) -> Figure:
    """One number by depth, with its interval."""
    figure = go.Figure([*banded(depths[curve.array], curve.name, "var(--run-0)", marks=False)])
    if curve.beside is not None and curve.beside[0] in depths:
        array, name = curve.beside
        for trace in banded(depths[array], name, "var(--run-5)", marks=False, dash="dot"):
            figure.add_trace(trace)
    figure.update_layout(showlegend=curve.beside is not None)
    return finished(figure, "depth (0: embedding)", curve.unit, log_y=curve.log)
