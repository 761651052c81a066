"""Figures of the circuit: sets of heads, the direction that carries position, and erasure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from posleak.analyses.circuit.carrier import Carrier
from posleak.analyses.circuit.circuit import Circuit
from posleak.analyses.circuit.erasure import Erased
from posleak.analyses.circuit.writing import TARGET_SHARE, RemovedBySize
from posleak.arrays import Array
from posleak.edits.direction import CONTROLS, ERASE, LEACE
from posleak.leakage import Estimate
from posleak.show.numbers import estimate, excludes_zero

from .figures import INTERVAL_HOVER, NO_TRACE_NAME, Figure, banded, error_bars, finished, value_map
from .view import RunView

METHOD_NAMES = {ERASE: "mean projection", LEACE: "LEACE"}
DIRECTION, CONTROL = "var(--earlier)", "var(--left)"
WIDEST = (-1.0, 2.0)
"""Range of shares beyond which an axis does not reach."""


def of_run(view: RunView) -> dict[str, Figure]:
    """Return the figures of the section by name; those without a defined value are left out."""
    circuit = view.circuit
    if circuit is None:
        return {}
    figures = dict[str, Figure]()
    if any(math.isfinite(row.leading.removed.value) for row in circuit.writing.removed):
        figures["circuit-removed"] = removed(circuit)
    if (carrier := circuit.carrier) is not None:
        figures["circuit-curve"] = curve(carrier, carrier.middle)
        figures["circuit-share"] = positional_share(carrier)
        figures["circuit-relation"] = relation(carrier)
        figures["circuit-alignment"] = alignment(carrier)
        if np.isfinite(carrier.spectrum.value).any():
            figures["circuit-spectrum"] = spectrum(carrier)
    if any(math.isfinite(row.earlier_removed.value) for row in circuit.erasure):
        figures["circuit-erasure"] = erasure(circuit.erasure)
    if any(math.isfinite(row.loss_change.value) for row in circuit.erasure):
        figures["circuit-loss"] = loss(circuit.erasure)
    return figures


def some_depths(carrier: Carrier) -> list[int]:
    """Return the depths at 1/4, 1/2, 3/4 and at the end of the model."""
    return sorted({round(carrier.last * quarter / 4) for quarter in (1, 2, 3, 4)})


def erasures(rows: Sequence[Erased]) -> list[Erased]:
    """Return the rows that are not controls themselves."""
    return [row for row in rows if row.method in CONTROLS]


def erasure_name(row: Erased) -> str:
    """Return a short name of an erasure."""
    return f"{METHOD_NAMES[row.method]}, k = {row.k}" + ", significant depths" * bool(row.depths)


def removed(circuit: Circuit) -> Figure:
    """Draw what the first k heads, all other heads and random sets remove, by k."""
    rows = circuit.writing.removed
    k = np.array([row.k for row in rows], dtype=float)
    own, others, random = (_by_size(rows, name) for name in ("removed", "others", "random"))
    figure = go.Figure([*banded(own, "first k heads", "var(--mask)", x=k)])
    if np.isfinite(others.value).any():
        at = np.isfinite(others.value)
        figure.add_traces(list(banded(others[at], "all other heads", "var(--origin)", x=k[at], dash="dot")))
    draws = [(row.k, draw) for row in rows for draw in row.leading.draws if math.isfinite(draw)]
    if draws:
        figure.add_traces(_random(random, k, draws))
    figure.add_hline(y=TARGET_SHARE, line={"color": "var(--muted)", "width": 1, "dash": "dot"})
    figure.add_hline(y=0, line={"color": "var(--faint)", "width": 1})
    if circuit.writing.writers:
        figure.add_vline(x=len(circuit.writing.writers), line={"color": "var(--ink)", "width": 1.5, "dash": "dot"})
    return finished(
        figure, "k, number of heads", "share removed",
        xaxis={"type": "log", "tickvals": k.tolist(), "ticktext": [str(row.k) for row in rows],
               "range": [math.log10(k[0] / 1.15), math.log10(k[-1] * 1.15)]},
        yaxis={"tickformat": ".0%", "range": _range([own, others, random], [draw for _, draw in draws])},
    )  # fmt: skip


def _random(random: Estimate, k: Array, draws: Sequence[tuple[int, float]]) -> list[go.Scatter]:
    """Return single random sets as faint dots, and their means with intervals."""
    at = np.isfinite(random.value)
    means = random[at]
    cells = [means[row] for row in range(int(at.sum()))]
    return [
        go.Scatter(
            x=[size for size, _ in draws], y=[draw for _, draw in draws], name="single random sets", mode="markers",
            marker={"color": CONTROL, "size": 5, "symbol": "circle", "opacity": 0.45},
            hovertemplate=f"one set of %{{x}} random heads: %{{y:.1%}}{NO_TRACE_NAME}",
        ),
        go.Scatter(
            x=k[at].tolist(), y=means.value.tolist(), customdata=_ends(means), mode="markers",
            name="random heads, mean",
            marker={"color": "var(--total)", "size": 9,
                    "symbol": ["square" if excludes_zero(cell) else "square-open" for cell in cells]},
            error_y=error_bars(cells, "var(--total)", thickness=1.5, width=4),
            hovertemplate=f"%{{x}} random heads of the same layers: {INTERVAL_HOVER}{NO_TRACE_NAME}",
        ),
    ]  # fmt: skip


def curve(carrier: Carrier, depth: int) -> Figure:
    """Draw the mean coefficient along the direction of one depth against position; the script sets other depths."""
    x = np.array(carrier.positions, dtype=float)
    figure = go.Figure([*banded(carrier.curve[depth], "coefficient", DIRECTION, x=x, marks=False)])
    figure.add_hline(y=0, line={"color": "var(--faint)", "width": 1})
    octaves = [2**power for power in range(24) if x[0] <= 2**power <= x[-1]]
    log = {"type": "log", "tickvals": octaves, "ticktext": list(map(str, octaves))} if len(octaves) > 1 else {}
    return finished(figure, "position", "coefficient", showlegend=False, xaxis=log)


def positional_share(carrier: Carrier) -> Figure:
    """Draw the positional share of the variance by depth."""
    figure = go.Figure([*banded(carrier.share, "positional share of the variance", "var(--mask)")])
    figure.add_hline(y=0, line={"color": "var(--faint)", "width": 1})
    return finished(figure, "depth (0: embedding)", "share of the variance", showlegend=False)


def spectrum(carrier: Carrier) -> Figure:
    """Map the share of the positional variance by direction and depth; columns where it is not defined are empty."""
    by_depth = carrier.spectrum
    value, low, high = (np.asarray(end).T for end in (by_depth.value, by_depth.low, by_depth.high))
    rows = [f"direction {k + 1}" for k in range(len(value))]
    cells = value_map(Estimate(value, low, high, by_depth.n), rows, "depth", "earlier", "share")
    figure = go.Figure(cells.update(hoverongaps=False))
    ticks = {"tickvals": list(range(len(rows))), "ticktext": [str(k + 1) for k in range(len(rows))]}
    return finished(
        figure, "depth (0: embedding)", "direction", xaxis={"showgrid": False, "range": [-0.5, value.shape[1] - 0.5]},
        yaxis={"range": [len(rows) - 0.5, -0.5], "showgrid": False, **ticks}, showlegend=False,
    )  # fmt: skip


def alignment(carrier: Carrier) -> Figure:
    """Map |cos| between the leading directions of two depths."""
    z, last = np.round(np.asarray(carrier.alignment), 4), len(carrier.dimensions) - 0.5
    heat = go.Heatmap(
        z=z.tolist(), zmin=0, zmax=1, colorscale=[[0, "var(--wash)"], [1, DIRECTION]], hoverongaps=False,
        colorbar={"thickness": 10, "title": {"text": "|cos|"}, "tickvals": [0, 0.25, 0.5, 0.75, 1],
                  "ticktext": ["0", "0.25", "0.5", "0.75", "1"]},
        hovertemplate=f"depth %{{y}} and depth %{{x}}: |cos| %{{z:.3f}}{NO_TRACE_NAME}",
    )  # fmt: skip
    axis = {"range": [-0.5, last], "showgrid": False}
    return finished(go.Figure(heat), "depth (0: embedding)", "depth", xaxis=axis, yaxis=axis, showlegend=False)


def relation(carrier: Carrier) -> Figure:
    """Draw |cos| of the leading direction with the state of position 0, and its share in massive channels, by depth."""
    lines = {
        "|cos| with the state of position 0": (np.abs(carrier.with_origin), "var(--sink)", "solid"),
        "share in massive channels": (carrier.in_massive, "var(--drift)", "dot"),
    }
    figure = go.Figure()
    for name, (values, colour, dash) in lines.items():
        figure.add_scatter(
            x=list(range(len(values))), y=np.asarray(values, dtype=float).tolist(), name=name, mode="lines",
            line={"color": colour, "width": 2, "dash": dash},
            hovertemplate=f"{name}, depth %{{x}}: %{{y:.3f}}{NO_TRACE_NAME}",
        )  # fmt: skip
    return finished(figure, "depth (0: embedding)", "", yaxis={"range": [-0.03, 1.05]})


def erasure(rows: Sequence[Erased]) -> Figure:
    """Draw the share of the leakage from earlier layers that each erasure and its random control remove."""
    ends = [row.earlier_removed for row in rows]
    axis = {"tickformat": ".0%", "range": _range(ends, [])}
    pairs = [(erasure_name(row), row.earlier_removed, row.random) for row in erasures(rows)]
    return _with_controls(pairs, "share removed", "share", axis)


def loss(rows: Sequence[Erased]) -> Figure:
    """Draw the change of the next-token loss under each erasure and its random control."""
    pairs = [(erasure_name(row), row.loss_change, row.random_loss) for row in erasures(rows)]
    return _with_controls(pairs, "nats per token", "", {})


def _with_controls(
    pairs: Sequence[tuple[str, Estimate, Estimate | None]], title: str, unit: str, axis: Mapping[str, Any]
) -> Figure:  # fmt: skip
    """Draw one row per erasure: the erasure above its control; open markers are not significantly different from 0."""
    figure = go.Figure()
    looks = (("erased", 0, DIRECTION, "circle"), ("random directions", 1, CONTROL, "square"))
    for name, k, colour, shape in looks:
        cells = [(row, x) for row, (_, *pair) in enumerate(pairs) if (x := pair[k]) and math.isfinite(x.value)]
        figure.add_scatter(
            x=[x.value for _, x in cells], y=[row + (0.16 if k else -0.16) for row, _ in cells],
            name=name, mode="markers",
            marker={"color": colour, "size": 9,
                    "symbol": [shape if excludes_zero(x) else f"{shape}-open" for _, x in cells]},
            error_x=error_bars([x for _, x in cells], colour, thickness=2, width=0),
            customdata=[[pairs[row][0], estimate(x, unit)] for row, x in cells],
            hovertemplate=f"%{{customdata[0]}}, {name}: %{{customdata[1]}}{NO_TRACE_NAME}",
        )  # fmt: skip
    figure.add_vline(x=0, line={"color": "var(--muted)", "width": 1})
    labels = [name for name, *_ in pairs]
    ticks = {"tickvals": list(range(len(labels))), "ticktext": labels, "range": [len(labels) - 0.5, -0.5]}
    return finished(figure, title, "", xaxis=axis, yaxis={**ticks, "showgrid": False})


def _by_size(rows: Sequence[RemovedBySize], name: str) -> Estimate:
    """Return one estimate of all sizes; NaN where a size was not measured."""
    cells: list[Estimate | None] = [getattr(row.leading, name) for row in rows]
    value, low, high = (
        np.array([math.nan if cell is None else getattr(cell, end) for cell in cells], dtype=float)
        for end in ("value", "low", "high")
    )
    return Estimate(value, low, high, max((cell.n for cell in cells if cell is not None), default=0))


def _ends(estimate: Estimate) -> list[list[float]]:
    cells: list[list[float]] = np.stack([estimate.value, estimate.low, estimate.high], axis=-1).tolist()
    return cells


def _range(estimates: Iterable[Estimate], values: Sequence[float]) -> list[float]:
    """Return a range of shares that shows 0 to 1, every value, and intervals up to WIDEST."""
    cells = np.concatenate([np.ravel([x.value, x.low, x.high]) for x in estimates] + [np.array(values)])
    low, high = min([0.0, *cells[np.isfinite(cells)]]), max([1.0, *cells[np.isfinite(cells)]])
    return [max(low, WIDEST[0]) - 0.06, min(high, WIDEST[1]) + 0.06]
