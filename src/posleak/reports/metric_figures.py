"""Figures of metrics of other papers: rank agreement as maps, reference frames by layer, curves by depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Bool, Float64

from posleak.leakage import Estimate
from posleak.metrics.agreement import LEAKAGE, Agreement, RankAgreement
from posleak.metrics.catalogue import BY_ID, Looks
from posleak.metrics.table import FRAMES, FrameVerdict
from posleak.show import numbers

from .figures import NO_TRACE_NAME, Figure, banded, escaped, finished
from .view import RunView

GROUPS = {Looks.LOGITS: "logits", Looks.ATTENTION: "attention", Looks.STATES: "states"}
"""Headings of the maps' rows."""

FRAME_NAMES = {name: "none" if name == "no_frame" else name for name in FRAMES}
FRAME_COLOURS = dict(zip(FRAMES, ("run-0", "run-1", "run-3", "faint"), strict=True))
MARK_COLOURS = FRAME_COLOURS | {"no_frame": "muted"}

NOT_SIGNIFICANT, UNDEFINED = "○", "×"
"""Marks of cells whose interval contains 0 or is missing, and of cells without a value."""


@dataclass(frozen=True)
class Curve:
    """An array by depth and how it is drawn; `other` is a second array, drawn dotted, and its name."""

    array: str
    name: str
    title: str
    unit: str
    log: bool = False
    other: tuple[str, str] | None = None


CURVES = (
    Curve("norm_0", "position 0", "Norm of the state at position 0", "norm", True, ("norm_body", "median of others")),
    Curve("spectrum_entropy", "entropy", "Entropy of the states' singular spectrum", "nats"),
    Curve("largest", "largest", "Largest activation", "|x|", True),
    Curve("probe_error", "error", "Error of the position probe", "tokens"),
)


def of_run(view: RunView) -> dict[str, Figure]:
    """Return the figures of the section by name; none without metrics."""
    if view.related is None:
        return {}
    figures, metrics = dict[str, Figure](), view.related.metrics
    for over, ranking in view.related.agreements.items():
        figures[f"agreement-{over}"] = agreement_map(ranking, leakage_of(ranking))
        figures[f"alike-{over}"] = agreement_map(ranking, ranking.rows)
    if metrics.frames:
        figures["frames"] = frames(metrics.frames, view)
    return figures | {f"by-depth-{curve.array}": by_depth(curve, metrics.depths) for curve in curves_of(metrics.depths)}


def curves_of(depths: Mapping[str, Estimate]) -> list[Curve]:
    """Return the curves that have data."""
    return [curve for curve in CURVES if curve.array in depths and np.isfinite(depths[curve.array].value).any()]


def leakage_of(ranking: Agreement) -> tuple[str, ...]:
    """Return the columns that are powers of the leakage."""
    return tuple(name for name in ranking.columns if name in LEAKAGE)


def label(name: str) -> str:
    """Return the short name of a metric; other names are returned unchanged."""
    return BY_ID[name].label if name in BY_ID else name


def rho_interval(cell: RankAgreement) -> str:
    """Return the interval of ρ, such as `(0.63 … 0.85)`, or `(no interval)`."""
    return numbers.interval(cell) or "(no interval)"


def grouped(rows: Sequence[str]) -> list[str | Looks]:
    """Return rows with a heading before each group of metrics that look at the same thing."""
    lines = list[str | Looks]()
    for looks in Looks:
        group = [name for name in rows if name in BY_ID and BY_ID[name].looks is looks]
        lines += [looks, *group] if group else []
    return lines


def agreement_map(ranking: Agreement, columns: Sequence[str]) -> Figure:
    """Map ρ of metrics with `columns` on a scale that diverges at 0; cells that are not significant are pale."""
    lines = grouped(ranking.rows)
    at = [ranking.columns.index(name) for name in columns]
    rho, low, high = (np.full((len(lines), len(columns)), np.nan) for _ in range(3))
    filled = np.zeros(rho.shape, dtype=bool)
    for y, metric in enumerate(lines):
        if isinstance(metric, str):
            row, filled[y] = ranking.rows.index(metric), True
            rho[y], low[y], high[y] = ranking.rho[row, at], ranking.low[row, at], ranking.high[row, at]
    hover = [[_cell_text(ranking, metric, name) for name in columns] for metric in lines]
    clear = (low > 0) | (high < 0)
    kinds: list[tuple[Bool[np.ndarray, "rows columns"], float, str | list[list[str]]]] = [
        (clear & filled, 1.0, [[f"{x:.2f}".replace("-", "−").replace("0.", ".") for x in row] for row in rho.tolist()]),
        (~clear & np.isfinite(rho), 0.45, NOT_SIGNIFICANT),
        (filled & ~np.isfinite(rho), 1.0, UNDEFINED),
    ]
    drawn = [(cells, opacity, text) for cells, opacity, text in kinds if cells.any()]
    figure = go.Figure([_cells(np.nan_to_num(rho), *kind, hover, k == 0) for k, kind in enumerate(drawn)])
    names = [label(line) if isinstance(line, str) else f"<b>{GROUPS[line]}</b>" for line in lines]
    angle = -60 if tuple(columns) == ranking.rows else -45 if len(columns) > 5 else 0
    return finished(
        figure, "", "",
        xaxis={"tickvals": list(range(len(columns))), "ticktext": [label(name) for name in columns], "showgrid": False,
               "side": "top", "tickangle": angle, "range": [-0.5, len(columns) - 0.5]},
        yaxis={"tickvals": list(range(len(lines))), "ticktext": names, "range": [len(lines) - 0.5, -0.5],
               "showgrid": False},
        showlegend=False, margin={"l": 10, "r": 10, "t": 10, "b": 10},
    )  # fmt: skip


def _cells(
    rho: Float64[np.ndarray, "rows columns"], shown: Bool[np.ndarray, "rows columns"], opacity: float,
    text: str | list[list[str]], hover: list[list[str]], scale: bool,
) -> go.Heatmap:  # fmt: skip
    """Return one trace for all cells of one appearance; the first trace shows the scale."""
    marks = np.where(shown, np.array(text), "").tolist()
    return go.Heatmap(
        z=np.where(shown, rho, np.nan).tolist(), zmin=-1, zmax=1, xgap=1, ygap=1, opacity=opacity, hoverongaps=False,
        colorscale=[[0, "var(--negative)"], [0.5, "var(--wash)"], [1, "var(--here)"]], text=marks,
        texttemplate="%{text}", textfont={} if isinstance(text, list) else {"color": "var(--ink)"},
        customdata=hover, hovertemplate=f"%{{customdata}}{NO_TRACE_NAME}", showscale=scale,
        colorbar={"thickness": 10, "title": {"text": "ρ"}, "tickvals": [-1, -0.5, 0, 0.5, 1],
                  "ticktext": ["−1", "−0.5", "0", "0.5", "1"]},
    )  # fmt: skip


def _cell_text(ranking: Agreement, row: str | Looks, column: str) -> str:
    if not isinstance(row, str):
        return ""
    cell = ranking.cell(ranking.rows.index(row), column)
    value = "not defined" if np.isnan(cell.rho) else f"ρ = {numbers.number(cell.rho)} {rho_interval(cell)}"
    title, other = (BY_ID[name].title if name in BY_ID else name for name in (row, column))
    return escaped(f"{title} · {other}: {value}, n = {ranking.n} {ranking.over}")


def frames(types: Sequence[FrameVerdict], view: RunView) -> Figure:
    """Stack the shares of the frame types by layer; a mark above each layer is filled where its type is significant."""
    x, names, figure = view.summary.places.tolist(), view.summary.layer_names, go.Figure()
    for kind, title in FRAME_NAMES.items():
        shares = [layer.shares[kind] for layer in types]
        texts = [[name, numbers.estimate(share, "share")] for name, share in zip(names, shares)]
        hover = f"layer %{{customdata[0]}}, {title}: %{{customdata[1]}}{NO_TRACE_NAME}"
        figure.add_bar(
            x=x, y=[float(share.value) for share in shares], name=title, customdata=texts, hovertemplate=hover,
            marker={"color": f"var(--{FRAME_COLOURS[kind]})"},
        )  # fmt: skip
    figure.add_scatter(
        x=x, y=[1.06] * len(x), mode="markers", name="type", showlegend=False,
        marker={"color": [f"var(--{MARK_COLOURS[layer.kind]})" for layer in types], "size": 8,
                "symbol": ["circle" if layer.clear else "circle-open" for layer in types],
                "line": {"color": "var(--ink)", "width": 1}},
        customdata=[[name, layer.words, numbers.estimate(layer.margin, "share")] for name, layer in zip(names, types)],
        hovertemplate=f"layer %{{customdata[0]}}: %{{customdata[1]}}; margin %{{customdata[2]}}{NO_TRACE_NAME}",
    )  # fmt: skip
    return finished(
        figure, "layer", "share of the anchors", barmode="stack", bargap=0.12,
        yaxis={"range": [0, 1.14], "tickformat": ".0%", "tickvals": [0, 0.25, 0.5, 0.75, 1], "showgrid": False},
    )  # fmt: skip


def by_depth(curve: Curve, depths: Mapping[str, Estimate]) -> Figure:
    """Draw one array by depth, with its interval."""
    figure = go.Figure([*banded(depths[curve.array], curve.name, "var(--run-0)", marks=False)])
    if curve.other is not None and curve.other[0] in depths:
        array, name = curve.other
        figure.add_traces(list(banded(depths[array], name, "var(--run-5)", marks=False, dash="dot")))
    return finished(figure, "depth (0: embedding)", curve.unit, log_y=curve.log, showlegend=curve.other is not None)
