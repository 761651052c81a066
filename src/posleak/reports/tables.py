"""Every table behind the page, one row per number, for CSV and Parquet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from posleak.leakage import Estimate, tidy
from posleak.leakage.sampled import POWER_UNIT, SHARE_UNIT, LabelledEstimate
from posleak.leakage.summary import Decomposition
from posleak.metrics import Metrics
from posleak.metrics.catalogue import BY_ID
from posleak.typed import plain

from .compare import QUANTITIES, Comparison
from .view import RunView

Row = dict[str, Any]
Rows = Iterator[LabelledEstimate | Row]


def tables(views: Sequence[RunView], compared: Comparison | None = None) -> dict[str, list[Row]]:
    """Return the tables by name, without empty ones; the column `run` is the run's label on the page."""
    makers: dict[str, Callable[[RunView], Rows]] = {
        "model": _model, "layers": _layers, "heads": _heads, "queries": _queries, "offsets": _offsets,
        "sink_profile": _sink_profile, "trace": _trace, "trace_heads": _trace_heads, "trace_by_layer": _trace_by_layer,
        "claims": _claims, "edits": _edits, "sink_heads": _sink_heads, "trajectory": _trajectory, "portrait": _portrait,
        "metrics": _metrics, "metric_layers": _metric_layers, "metric_depths": _metric_depths,
        "frames": _frames, "agreement": _agreement,
    }  # fmt: skip
    made = {name: [_row(row, view) for view in views for row in maker(view)] for name, maker in makers.items()}
    if compared is not None:
        made["comparison"] = list(_comparison(compared))
    return {name: rows for name, rows in made.items() if rows}


def _row(row: LabelledEstimate | Row, view: RunView) -> Row:
    """Add the run's label, and the layer id of the attention call; None if the row is about all calls."""
    cells: Row = plain(row.as_row()) if isinstance(row, LabelledEstimate) else row
    if "call" in cells and "layer" not in cells:
        call = cells["call"]
        cells = {"layer": None if call is None else view.summary.layer_ids[call], **cells}
    return {"run": view.label, **cells}


def _model(view: RunView) -> Rows:
    for queries, decomposition in view.summary.model.items():
        yield from decomposition.labelled(queries=queries)


def _layers(view: RunView) -> Rows:
    yield from _by_place(view.summary.layers, "call")
    labels = {"queries": "reference", "quantity": "sink_attention", "component": None, "unit": SHARE_UNIT}
    yield from LabelledEstimate(view.summary.layer_sink_attention, labels).cells("call")


def _by_place(decompositions: Mapping[str, Decomposition], *axes: str) -> Rows:
    for queries, decomposition in decompositions.items():
        for place in np.ndindex(decomposition.power["total"].value.shape):
            yield from decomposition[place].labelled(**dict(zip(axes, place)), queries=queries)


def _heads(view: RunView) -> Rows:
    """The rows of heads.parquet."""
    yield from tidy(view.summary)
    yield from () if (metrics := _of(view)) is None else metrics.tidy()


def _queries(view: RunView) -> Rows:
    """Curves of the head panel by query."""
    curves = view.curves
    yield from _curve(
        curves.attention, "query", curves.queries, quantity="attention_0", component=None, unit=SHARE_UNIT
    )
    for name, estimate in curves.mean.items():
        yield from _curve(estimate, "query", curves.queries, quantity="mean", component=name, unit="nats")
    for name, estimate in curves.power.items():
        yield from _curve(estimate, "query", curves.queries, quantity="power", component=name, unit=POWER_UNIT)


def _offsets(view: RunView) -> Rows:
    """Logits of the head panel by offset."""
    for queries, estimate in (("early", view.curves.early), ("reference", view.curves.late)):
        yield from _curve(estimate, "offset", view.curves.offsets, queries=queries, quantity="logit", unit="nats")


def _curve(estimate: Estimate, axis: str, positions: list[int], **labels: Any) -> Rows:
    for cell in LabelledEstimate(estimate, labels).cells("call", "head", axis):
        yield LabelledEstimate(cell.estimate, cell.labels | {axis: positions[cell.labels[axis]]})


def _sink_profile(view: RunView) -> Rows:
    """Attention of late queries to each of the first positions, and the width of each head's sink."""
    for cell in LabelledEstimate(view.summary.profile).cells("call", "head", "position"):
        width = int(view.summary.width[cell.labels["call"], cell.labels["head"]])
        yield LabelledEstimate(cell.estimate, cell.labels | {"width": width, "unit": SHARE_UNIT})


def _trace(view: RunView) -> Rows:
    """Sources of the model (no layer) and by layer; `direct` is D, the power of the origin is that of O."""
    if view.trace is None:
        return
    for queries, decomposition in view.trace.model.items():
        yield from decomposition.labelled(call=None, queries=queries)
    yield from _by_place(view.trace.layers, "call")


def _trace_heads(view: RunView) -> Rows:
    yield from () if view.trace is None else _by_place(view.trace.heads, "call", "head")


def _trace_by_layer(view: RunView) -> Rows:
    """Power left if the layers up to `lent_up_to` have a borrowed context (−1: none); no layer: mean from layer 1."""
    if view.trace is None or (ladder := view.trace.ladder) is None:
        return
    for k, upto in enumerate(ladder.upto):
        labels = {"lent_up_to": upto, "call": None, "quantity": "power", "unit": POWER_UNIT}
        yield LabelledEstimate(ladder.mean[k], labels)
        for call in range(len(view.summary.layer_names)):
            yield LabelledEstimate(ladder.left[k, call], labels | {"call": call})


def _claims(view: RunView) -> Rows:
    for claim in view.claims or ():
        yield {name: value for name, value in plain(claim).items() if name not in ("details", "edited")}


def _edits(view: RunView) -> Rows:
    """Power after / before each edit."""
    for claim, edited in view.edited:
        for kept in edited.kept:
            yield {
                "claim": claim.id, "edit": edited.edit, "about": edited.about, "component": kept.component,
                "queries": kept.queries, "layers": kept.layers, **plain(kept.ratio),
                "attention_before": plain(edited.attention_before), "attention_after": plain(edited.attention_after),
            }  # fmt: skip


def _sink_heads(view: RunView) -> Rows:
    for head in () if view.origin is None else view.origin.record.reading.heads:
        for name in ("at_0", "written", "spread", "positional", "along"):
            labels = {"layer": head.layer, "call": head.call, "head": head.head, "quantity": name}
            yield LabelledEstimate(getattr(head, name), labels)


def _trajectory(view: RunView) -> Rows:
    if view.origin is None:
        return
    path, many = view.origin.record.trajectory, view.origin.record.portrait
    for depth, norm in enumerate(path.norm.tolist()):
        among = many.among[depth]
        yield plain({
            "depth": depth, "norm": norm, "relative": path.relative[depth], "cosine_to_middle": path.middle[depth],
            "body_norm": path.body.median_norm[depth], "body_cosine": path.body.alike[depth],
            "first_tokens_cosine": among.value, "low": among.low, "high": among.high,
            "to_reference": many.to_reference.value[depth],
        })  # fmt: skip


def _portrait(view: RunView) -> Rows:
    if view.origin is None:
        return
    token, spelled, picture = (view.origin.arrays[name].values for name in ("token", "spelled", "picture"))
    for k, points in enumerate(picture.tolist()):
        for depth, (x, y) in enumerate(points):
            names = {"token": int(token[k]), "spelled": str(spelled[k]), "reference": k == 0}
            yield names | {"depth": depth, "x": x, "y": y}


def _of(view: RunView) -> Metrics | None:
    return None if view.related is None else view.related.metrics


def _metrics(view: RunView) -> Rows:
    """Metrics of other papers, with definitions and sources."""
    yield from () if (metrics := _of(view)) is None else (plain(row) for row in metrics.rows)


def _metric_layers(view: RunView) -> Rows:
    for name, estimate in () if (metrics := _of(view)) is None else metrics.layers.items():
        yield from LabelledEstimate(estimate, {"metric": name, "unit": BY_ID[name].unit}).cells("call")


def _metric_depths(view: RunView) -> Rows:
    """Arrays by depth; 0 is the embedding."""
    for name, estimate in () if (metrics := _of(view)) is None else metrics.depths.items():
        yield from LabelledEstimate(estimate, {"array": name}).cells("depth")


def _frames(view: RunView) -> Rows:
    """Share of each frame type by layer, and the margin of the largest over the next."""
    for call, frame in enumerate(() if (metrics := _of(view)) is None else metrics.frames):
        for quantity, share in {**frame.shares, "margin": frame.margin}.items():
            labels = {"call": call, "kind": frame.kind, "clear": frame.clear, "quantity": quantity, "unit": "share"}
            yield LabelledEstimate(share, labels)


def _agreement(view: RunView) -> Rows:
    """Spearman's ρ of every metric with every component and every other metric; n: number of heads or layers."""
    for over, ranking in () if view.related is None else view.related.agreements.items():
        for row, metric in enumerate(ranking.rows):
            for name in ranking.columns:
                cell = ranking.cell(row, name)
                ends = {"value": cell.rho, "low": cell.low, "high": cell.high, "n": ranking.n}
                yield plain({"over": over, "metric": metric, "with": name} | ends)


def _comparison(compared: Comparison) -> Iterator[Row]:
    for row in compared.rows:
        for name, estimate in row.cells.items():
            minus = None if row.minus is None else compared.labels[row.minus]
            labels = {"run": compared.labels[row.run], "minus": minus, "paired": row.paired}
            labels |= {"queries": row.queries, "quantity": name, "unit": QUANTITIES[name]}
            yield plain(LabelledEstimate(estimate, labels).as_row())
