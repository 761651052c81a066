"""Every table behind the page, one record per line, ready for CSV and Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from posleak.leakage import Estimate, tidy
from posleak.leakage.number import LabelledEstimate
from posleak.leakage.summary import Decomposition
from posleak.metrics.catalogue import BY_ID
from posleak.typed import plain

from .compare import QUANTITIES, comparison
from .gather import ShownRun
from .related import agreements

Record = dict[str, Any]


def tables(found: Sequence[ShownRun]) -> dict[str, list[Record]]:
    """Tables by name, empty ones left out. `run` is the run's label on the page."""
    makers = {
        "model": _model, "layers": _layers, "heads": _heads, "queries": _queries, "offsets": _offsets,
        "sink_profile": _sink_profile, "trace": _trace, "trace_heads": _trace_heads, "trace_by_layer": _trace_by_layer,
        "claims": _claims, "edits": _edits, "sink_heads": _sink_heads, "trajectory": _trajectory, "portrait": _portrait,
        "metrics": _metrics, "metric_layers": _metric_layers, "metric_depths": _metric_depths,
        "frames": _frames, "agreement": _agreement,
    }  # fmt: skip
    made = {
        name: [{"run": s.label, **_numbered(row, s)} for s in found for row in maker(s)]
        for name, maker in makers.items()
    }
    if len(found) > 1:
        made["comparison"] = list(_comparison(found))
    return {name: rows for name, rows in made.items() if rows}


def _numbered(row: Record, shown: ShownRun) -> Record:
    """A row about an attention call (None: about all) with the number that its layer has in the model."""
    if "call" not in row or "layer" in row:
        return row
    call = row["call"]
    return {"layer": None if call is None else shown.run.summary.layer_ids[call], **row}


def _model(shown: ShownRun) -> Iterator[Record]:
    for queries, numbers in shown.run.summary.model.items():
        yield from _rows(numbers, queries=queries)


def _layers(shown: ShownRun) -> Iterator[Record]:
    summary = shown.run.summary
    for queries, numbers in summary.layers.items():
        for layer in range(len(numbers.stabilisation.value)):
            yield from _rows(numbers[layer], call=layer, queries=queries)
    for layer in range(len(summary.layer_sink_attention.value)):
        cell = summary.layer_sink_attention[layer]
        yield _row(cell, call=layer, queries="reference", quantity="sink_attention", component=None, unit="1")


def _heads(shown: ShownRun) -> Iterator[Record]:
    """As in heads.parquet, which has the metrics too."""
    yield from tidy(shown.run.summary)
    yield from () if shown.neighbours is None else shown.neighbours.tidy()


def _queries(shown: ShownRun) -> Iterator[Record]:
    """The head panel's curves by query."""
    found = shown.curves
    kinds: list[tuple[str, str | None, Estimate, str]] = [("attention_0", None, found.attention, "1")]
    kinds += [("mean", name, estimate, "nats") for name, estimate in found.mean.items()]
    kinds += [("power", name, estimate, "nats²") for name, estimate in found.power.items()]
    for quantity, name, estimate, unit in kinds:
        yield from _cells(estimate, found.queries, "query", quantity=quantity, component=name, unit=unit)


def _offsets(shown: ShownRun) -> Iterator[Record]:
    """The head panel's logits by offset."""
    found = shown.curves
    for queries, estimate in (("early", found.early), ("reference", found.late)):
        yield from _cells(estimate, found.offsets, "offset", queries=queries, quantity="logit", unit="nats")


def _cells(estimate: Estimate, places: list[int], axis: str, **more: Any) -> Iterator[Record]:
    for layer, head, k in np.ndindex(estimate.value.shape):
        yield _row(estimate[layer, head, k], call=layer, head=head, **{axis: places[k]}, **more)


def _sink_profile(shown: ShownRun) -> Iterator[Record]:
    """Attention of late queries to each of the first positions, and how many of them a head's sink takes."""
    summary = shown.run.summary
    for layer, head, position in np.ndindex(summary.profile.value.shape):
        cell = summary.profile[layer, head, position]
        yield _row(cell, call=layer, head=head, position=position, width=int(summary.width[layer, head]), unit="1")


def _trace(shown: ShownRun) -> Iterator[Record]:
    """Where position comes from, of the model (no layer) and by layer; `direct` is D, the origin's power that of O."""
    if shown.trace is None:
        return
    for queries, numbers in shown.trace.model.items():
        yield from _rows(numbers, call=None, queries=queries)
    for queries, numbers in shown.trace.layers.items():
        for layer in range(len(numbers.power["total"].value)):
            yield from _rows(numbers[layer], call=layer, queries=queries)


def _trace_heads(shown: ShownRun) -> Iterator[Record]:
    for queries, numbers in () if shown.trace is None else shown.trace.heads.items():
        for layer, head in np.ndindex(numbers.power["total"].value.shape):
            yield from _rows(numbers[layer, head], call=layer, head=head, queries=queries)


def _trace_by_layer(shown: ShownRun) -> Iterator[Record]:
    """Power that is left where a context was lent up to a layer (−1: to none); without a layer, the mean of 1 and
    later."""
    if shown.trace is None or (ladder := shown.trace.ladder) is None:
        return
    for k, upto in enumerate(ladder.upto):
        yield _row(ladder.mean[k], lent_up_to=upto, call=None, quantity="power", unit="nats²")
        for layer in range(ladder.left.value.shape[1]):
            yield _row(ladder.left[k, layer], lent_up_to=upto, call=layer, quantity="power", unit="nats²")


def _claims(shown: ShownRun) -> Iterator[Record]:
    for result in shown.claims or ():
        yield {name: value for name, value in plain(result).items() if name not in ("details", "edited")}


def _edits(shown: ShownRun) -> Iterator[Record]:
    """Power after / before each edit."""
    chosen = [(result, result.edited) for result in shown.claims or () if result.edited is not None]
    for result, edited in chosen:
        for kept in edited.kept:
            yield {
                "claim": result.id, "edit": edited.edit, "about": edited.about, "component": kept.component,
                "queries": kept.queries, "layers": kept.layers, **plain(kept.ratio),
                "attention_before": plain(edited.attention_before), "attention_after": plain(edited.attention_after),
            }  # fmt: skip


def _sink_heads(shown: ShownRun) -> Iterator[Record]:
    for head in shown.origin.record.reading.heads if shown.origin is not None else ():
        for name in ("at_0", "written", "spread", "positional", "along"):
            yield _row(getattr(head, name), layer=head.layer, call=head.call, head=head.head, quantity=name)


def _trajectory(shown: ShownRun) -> Iterator[Record]:
    if shown.origin is None:
        return
    path, many = shown.origin.record.trajectory, shown.origin.record.portrait
    for depth, norm in enumerate(path.norm.tolist()):
        among = many.among[depth]
        yield plain(
            {
                "depth": depth, "norm": norm, "relative": path.relative[depth], "cosine_to_middle": path.middle[depth],
                "body_norm": path.body.median_norm[depth], "body_cosine": path.body.alike[depth],
                "first_tokens_cosine": among.value, "low": among.low, "high": among.high,
                "to_reference": many.to_reference.value[depth],
            }
        )  # fmt: skip


def _portrait(shown: ShownRun) -> Iterator[Record]:
    if shown.origin is None:
        return
    arrays = shown.origin.arrays
    picture = arrays["picture"].values
    for k, (token, spelled) in enumerate(zip(arrays["token"].values, arrays["spelled"].values)):
        for depth, (x, y) in enumerate(picture[k].tolist()):
            yield {"token": int(token), "spelled": str(spelled), "reference": k == 0, "depth": depth, "x": x, "y": y}


def _metrics(shown: ShownRun) -> Iterator[Record]:
    """The table of what others measure, with definitions and sources."""
    for row in () if shown.neighbours is None else shown.neighbours.rows:
        yield plain(row)


def _metric_layers(shown: ShownRun) -> Iterator[Record]:
    for name, found in {} if shown.neighbours is None else shown.neighbours.layers.items():
        for layer in range(len(found.value)):
            yield _row(found[layer], call=layer, metric=name, unit=BY_ID[name].unit)


def _metric_depths(shown: ShownRun) -> Iterator[Record]:
    """Arrays by depth; 0 is the embedding."""
    for name, found in {} if shown.neighbours is None else shown.neighbours.depths.items():
        for depth in range(len(found.value)):
            yield _row(found[depth], depth=depth, array=name)


def _frames(shown: ShownRun) -> Iterator[Record]:
    """The reference frame of each layer: the share of each type, and the margin of the largest over the next."""
    for layer, found in enumerate(() if shown.neighbours is None else shown.neighbours.frames):
        for quantity, cell in {**found.shares, "margin": found.margin}.items():
            yield _row(cell, call=layer, kind=found.kind, clear=found.clear, quantity=quantity, unit="share")


def _agreement(shown: ShownRun) -> Iterator[Record]:
    """Spearman's ρ of every metric with every part of the leakage and with every other metric; n: heads or layers."""
    every = {} if shown.neighbours is None else agreements(shown.run, shown.trace)
    for over, found in every.items():
        for row, metric in enumerate(found.rows):
            for name in found.columns:
                part = found.cell(row, name)
                yield plain(
                    {"over": over, "metric": metric, "with": name, "value": part.rho, "low": part.low,
                     "high": part.high, "n": found.n}
                )  # fmt: skip


def _comparison(found: Sequence[ShownRun]) -> Iterator[Record]:
    compared = comparison(found)
    for row in compared.rows:
        for name, cell in row.cells.items():
            minus = None if row.minus is None else compared.labels[row.minus]
            yield {"run": compared.labels[row.run], "minus": minus, "paired": row.paired} | _row(
                cell, queries=row.queries, quantity=name, unit=QUANTITIES[name]
            )


def _rows(numbers: Decomposition, **labels: Any) -> Iterator[Record]:
    for number in numbers.labelled(**labels):
        yield _row(number.estimate, **number.labels)


def _row(estimate: Estimate, **labels: Any) -> Record:
    row: Record = plain(LabelledEstimate(estimate, labels).as_row())
    return row
