"""Every table behind the page, one row per number, for CSV and Parquet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from posleak.analyses.circuit.carrier import Carrier
from posleak.analyses.circuit.circuit import Circuit
from posleak.analyses.origin.origin import StoredOrigin
from posleak.analyses.trace.trace import Trace
from posleak.leakage import Estimate, tidy
from posleak.leakage.sampled import POWER_UNIT, SHARE_UNIT, LabelledEstimate
from posleak.leakage.summary import Decomposition
from posleak.metrics.catalogue import BY_ID
from posleak.runs.loss import LOSS_UNIT
from posleak.typed import plain

from .compare import QUANTITIES, Comparison
from .related import RelatedMetrics
from .view import RunView

Row = dict[str, Any]
NamedRows = Iterator[tuple[str, Iterable[LabelledEstimate | Row]]]
"""Names of tables, each with some of the table's rows; a name can occur several times."""

CURVE_UNITS = {"attention_0": SHARE_UNIT, "mean": "nats", "power": POWER_UNIT}
ERASED_UNITS = {
    "earlier_removed": SHARE_UNIT, "even": SHARE_UNIT, "random": SHARE_UNIT, "left": POWER_UNIT,
    "loss_change": LOSS_UNIT, "random_loss": LOSS_UNIT,
}  # fmt: skip
"""Quantities of an erasure and their units; `even` is `earlier_removed`, evenly weighted."""


def tables(views: Sequence[RunView], compared: Comparison | None = None) -> dict[str, list[Row]]:
    """Return the tables by name, without empty ones; the column `run` is the run's label on the page."""
    by_name = defaultdict[str, list[Row]](list)
    for view in views:
        sources = [_of_run(view), _of_claims(view)]
        sources += [] if view.trace is None else [_of_trace(view.trace)]
        sources += [] if view.circuit is None else [_of_circuit(view.circuit)]
        sources += [] if view.origin is None else [_of_origin(view.origin)]
        sources += [] if view.related is None else [_of_metrics(view.related)]
        for name, rows in chain.from_iterable(sources):
            by_name[name] += [_row(row, view) for row in rows]
    if compared is not None:
        by_name["comparison"] = list(_comparison(compared))
    return {name: rows for name, rows in by_name.items() if rows}


def _row(row: LabelledEstimate | Row, view: RunView) -> Row:
    """Add the run's label, and the layer id of the attention call; None if the row is about all calls."""
    cells: Row = plain(row.as_row()) if isinstance(row, LabelledEstimate) else row
    if "call" in cells and "layer" not in cells:
        call = cells["call"]
        cells = {"layer": None if call is None else view.summary.layer_ids[call], **cells}
    return {"run": view.label, **cells}


def _of_run(view: RunView) -> NamedRows:
    """Yield the results of a run; `heads` has the rows of heads.parquet, `queries` and `offsets` the curves of heads.

    `sink_profile` has the attention of late queries to each of the first positions, and the width of each head's sink.
    """
    summary, curves = view.summary, view.curves
    for queries, decomposition in summary.model.items():
        yield "model", decomposition.labelled(queries=queries)
    yield "layers", _by_place(summary.layers, "call")
    labels = {"queries": "reference", "quantity": "sink_attention", "component": None, "unit": SHARE_UNIT}
    yield "layers", LabelledEstimate(summary.layer_sink_attention, labels).cells("call")
    yield "heads", tidy(summary)
    for (quantity, component), estimate in curves.by_query.items():
        labels = {"quantity": quantity, "component": component, "unit": CURVE_UNITS[quantity]}
        yield "queries", _curve(estimate, "query", curves.queries, labels)
    for queries, estimate in curves.by_offset.items():
        labels = {"queries": queries, "quantity": "logit", "unit": "nats"}
        yield "offsets", _curve(estimate, "offset", curves.offsets, labels)
    for cell in LabelledEstimate(summary.profile).cells("call", "head", "position"):
        width = int(summary.width[cell.labels["call"], cell.labels["head"]])
        yield "sink_profile", [LabelledEstimate(cell.estimate, cell.labels | {"width": width, "unit": SHARE_UNIT})]


def _by_place(decompositions: Mapping[str, Decomposition], *axes: str) -> Iterator[LabelledEstimate]:
    for queries, decomposition in decompositions.items():
        for place in np.ndindex(decomposition.power["total"].value.shape):
            yield from decomposition[place].labelled(**dict(zip(axes, place)), queries=queries)


def _curve(estimate: Estimate, axis: str, positions: list[int], labels: Row) -> Iterator[LabelledEstimate]:
    for cell in LabelledEstimate(estimate, labels).cells("call", "head", axis):
        yield LabelledEstimate(cell.estimate, cell.labels | {axis: positions[cell.labels[axis]]})


def _of_claims(view: RunView) -> NamedRows:
    """Yield the claims, and power after / before each edit."""
    for claim in view.claims or ():
        yield "claims", [{name: x for name, x in plain(claim).items() if name not in ("details", "edited")}]
    for claim, edited in view.edited:
        for kept in edited.kept:
            labels = {"claim": claim.id, "edit": edited.edit, "about": edited.about, "component": kept.component}
            labels |= {"queries": kept.queries, "layers": kept.layers}
            attention = {"attention_before": edited.attention_before, "attention_after": edited.attention_after}
            yield "edits", [labels | plain(kept.ratio) | plain(attention)]


def _of_trace(trace: Trace) -> NamedRows:
    """Yield the decomposition by source in both norms: of the model (no layer), by layer and by head.

    `direct` is D; `order` is the difference between the shares of `earlier` in the two orders of removing masks.
    `trace_by_layer` has the power that remains if the layers up to `lent_up_to` have a borrowed context (−1: none), in
    the leading norm; no layer: mean from layer 1.
    """
    for queries, decomposition in trace.model.items():
        yield "trace", decomposition.labelled(call=None, queries=queries)
    yield "trace", _by_place(trace.layers, "call")
    yield "trace_heads", _by_place(trace.heads, "call", "head")
    if (ladder := trace.ladder) is not None:
        for k, upto in enumerate(ladder.upto):
            labels = {"lent_up_to": upto, "call": None, "quantity": "power", "unit": POWER_UNIT}
            yield "trace_by_layer", [LabelledEstimate(ladder.mean[k], labels)]
            for call in range(ladder.left.value.shape[1]):
                yield "trace_by_layer", [LabelledEstimate(ladder.left[k, call], labels | {"call": call})]


def _of_circuit(circuit: Circuit) -> NamedRows:
    """Yield the circuit: writers, sets of heads in both norms (draw: index of a random set), readers, edges, erasure.

    `circuit_attribution` has the attribution of every head, without an interval. `circuit_carrier` has the shares of
    the variance by depth and direction (1: the leading one; none: all together), `circuit_curve` the mean coefficient
    along the leading direction, and `circuit_alignment` |cos| between the leading directions of two depths.
    """
    writing = circuit.writing
    for rank, head in enumerate(writing.writers):
        labels: Row = {"layer": head.layer, "call": head.call, "head": head.head, "rank": rank + 1}
        labels |= {"attribution": head.attribution, "unit": SHARE_UNIT}
        for norm, estimate in (("attention", head.alone), ("even", head.even)):
            yield "circuit_writers", [LabelledEstimate(estimate, labels | {"norm": norm})]
    for (call, head), x in np.ndenumerate(writing.attribution.heads):
        row = {"call": call, "head": head, "attribution": x, "unit": POWER_UNIT, "n": writing.attribution.prompts}
        yield "circuit_attribution", [plain(row)]
    for sets in writing.removed:
        for norm, effect in sets.norms.items():
            labels = {"k": sets.k, "norm": norm, "unit": SHARE_UNIT}
            for quantity in ("removed", "random", "difference", "others"):
                if (share := getattr(effect, quantity)) is not None:
                    yield "circuit_removed", [LabelledEstimate(share, labels | {"heads": quantity, "draw": None})]
            for draw, value in enumerate(effect.draws):
                single = {
                    "heads": "random",
                    "draw": draw,
                    "value": value,
                    "low": None,
                    "high": None,
                    "n": effect.removed.n,
                }
                yield "circuit_removed", [plain(labels | single)]
    for reader in writing.readers:
        labels = {"layer": reader.layer, "call": reader.call, "head": reader.head}
        yield "circuit_readers", quantities(reader, labels, {"earlier": POWER_UNIT, "share": SHARE_UNIT})
    for edge in writing.edges:
        labels = {"writer": writing.writers[edge.writer].name, "reader": writing.readers[edge.reader].name}
        yield "circuit_edges", quantities(edge, labels, {"removed": POWER_UNIT, "share": SHARE_UNIT})
    if circuit.carrier is not None:
        yield from _of_carrier(circuit.carrier)
    for erased in circuit.erasure:
        labels = {"edit": erased.edit, "method": erased.method, "k": erased.k}
        yield "circuit_erasure", quantities(erased, labels, ERASED_UNITS)


def quantities(result: Any, labels: Row, units: Mapping[str, str]) -> list[LabelledEstimate]:
    """Return one row for each quantity of a result that is not None. units: of the quantities"""
    found = {name: getattr(result, name) for name in units}
    return [
        LabelledEstimate(value, labels | {"quantity": name, "unit": units[name]})
        for name, value in found.items()
        if value is not None
    ]


def _of_carrier(carrier: Carrier) -> NamedRows:
    for depth, count in enumerate(carrier.dimensions):
        labels: Row = {"depth": depth, "direction": None, "quantity": "share", "unit": SHARE_UNIT}
        facts: Row = plain({
            "dimensions": count, "with_origin": carrier.with_origin[depth], "in_massive": carrier.in_massive[depth],
        })  # fmt: skip
        yield "circuit_carrier", [LabelledEstimate(carrier.share[depth], labels | facts)]
        for k in range(carrier.spectrum.value.shape[1]):
            labels |= {"direction": k + 1, "quantity": "eigenvalue"}
            yield "circuit_carrier", [LabelledEstimate(carrier.spectrum[depth, k], labels | facts)]
        for at, position in enumerate(carrier.positions):
            yield "circuit_curve", [LabelledEstimate(carrier.curve[depth, at], {"depth": depth, "position": position})]
        cosines = enumerate(np.asarray(carrier.alignment)[depth].tolist())
        yield "circuit_alignment", plain([{"depth": depth, "other": other, "cosine": x} for other, x in cosines])


def _of_origin(origin: StoredOrigin) -> NamedRows:
    """Yield the analysis of position 0: sink-reading heads, states by depth, and the portrait of first tokens."""
    path, portrait = origin.record.trajectory, origin.record.portrait
    for head in origin.record.reading.heads:
        for name in ("at_0", "written", "spread", "positional", "along"):
            labels = {"layer": head.layer, "call": head.call, "head": head.head, "quantity": name}
            yield "sink_heads", [LabelledEstimate(getattr(head, name), labels)]
    for depth, norm in enumerate(path.norm.tolist()):
        among = portrait.among[depth]
        row: Row = plain({
            "depth": depth, "norm": norm, "relative": path.relative[depth], "cosine_to_middle": path.middle[depth],
            "body_norm": path.body.median_norm[depth], "body_cosine": path.body.alike[depth],
            "first_tokens_cosine": among.value, "low": among.low, "high": among.high,
            "to_reference": portrait.to_reference.value[depth],
        })  # fmt: skip
        yield "trajectory", [row]
    token, spelled, picture = (origin.arrays[name].values for name in ("token", "spelled", "picture"))
    for k, points in enumerate(picture.tolist()):
        labels = {"token": int(token[k]), "spelled": str(spelled[k]), "reference": k == 0}
        yield "portrait", [labels | {"depth": depth, "x": x, "y": y} for depth, (x, y) in enumerate(points)]


def _of_metrics(related: RelatedMetrics) -> NamedRows:
    """Yield metrics of other papers: with definitions and sources, by head, by layer, and by depth (0: embedding).

    `frames` has the share of each frame type by layer, and the margin of the largest over the next. `agreement` has
    Spearman's ρ of every metric with every component and every other metric; n: number of heads or layers.
    """
    metrics = related.metrics
    yield "heads", metrics.tidy()
    yield "metrics", [plain(row) for row in metrics.rows]
    for name, estimate in metrics.layers.items():
        labels = {"metric": name, "unit": BY_ID[name].unit}
        yield "metric_layers", LabelledEstimate(estimate, labels).cells("call")
    for name, estimate in metrics.depths.items():
        yield "metric_depths", LabelledEstimate(estimate, {"array": name}).cells("depth")
    for call, frame in enumerate(metrics.frames):
        for quantity, share in {**frame.shares, "margin": frame.margin}.items():
            verdict = {"call": call, "kind": frame.kind, "clear": frame.clear}
            yield "frames", [LabelledEstimate(share, verdict | {"quantity": quantity, "unit": "share"})]
    for over, ranking in related.agreements.items():
        for row, metric in enumerate(ranking.rows):
            for name in ranking.columns:
                cell = ranking.cell(row, name)
                ends = {"value": cell.rho, "low": cell.low, "high": cell.high, "n": ranking.n}
                yield "agreement", [plain({"over": over, "metric": metric, "with": name} | ends)]


def _comparison(compared: Comparison) -> Iterator[Row]:
    for row in compared.rows:
        for name, estimate in row.cells.items():
            minus = None if row.minus is None else compared.labels[row.minus]
            labels = {"run": compared.labels[row.run], "minus": minus, "paired": row.paired}
            labels |= {"queries": row.queries, "quantity": name, "unit": QUANTITIES[name]}
            yield plain(LabelledEstimate(estimate, labels).as_row())
