"""Every table behind the page, one record per line, ready for CSV and Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from posleak.leakage import Estimate, tidy
from posleak.plain import plain

from .compare import QUANTITIES, comparison
from .sources import Source
from .view import edited

Record = dict[str, Any]


def tables(found: Sequence[Source]) -> dict[str, list[Record]]:
    """Tables by name, those without a line left out. `run` is the run's label on the page."""
    makers = {
        "model": _model, "layers": _layers, "heads": _heads, "queries": _queries, "offsets": _offsets,
        "claims": _claims, "edits": _edits, "sink_heads": _sink_heads, "trajectory": _trajectory, "portrait": _portrait,
    }  # fmt: skip
    made = {name: [{"run": s.label, **row} for s in found for row in maker(s)] for name, maker in makers.items()}
    if len(found) > 1:
        made["comparison"] = list(_comparison(found))
    return {name: rows for name, rows in made.items() if rows}


def _model(source: Source) -> Iterator[Record]:
    for queries, numbers in source.run.summary.model.items():
        for name, estimate in numbers.power.items():
            yield _row(estimate, queries=queries, quantity="power", component=name, unit="nats²")
        for name, estimate in numbers.share.items():
            yield _row(estimate, queries=queries, quantity="share", component=name, unit="1")
        yield _row(numbers.stabilisation, queries=queries, quantity="stabilisation", component=None, unit="1")


def _layers(source: Source) -> Iterator[Record]:
    summary = source.run.summary
    for queries, numbers in summary.layers.items():
        for layer in range(len(numbers.stabilisation.value)):
            for name, estimate in numbers.power.items():
                yield _row(
                    estimate[layer], layer=layer, queries=queries, quantity="power", component=name, unit="nats²"
                )
            yield _row(
                numbers.stabilisation[layer], layer=layer, queries=queries, quantity="stabilisation", component=None,
                unit="1",
            )  # fmt: skip
    for layer in range(len(summary.layer_sink_attention.value)):
        cell = summary.layer_sink_attention[layer]
        yield _row(cell, layer=layer, queries="reference", quantity="sink_attention", component=None, unit="1")


def _heads(source: Source) -> Iterator[Record]:
    yield from tidy(source.run.summary)


def _queries(source: Source) -> Iterator[Record]:
    """The head panel's curves by query."""
    found = source.curves
    kinds: list[tuple[str, str | None, Estimate, str]] = [("attention_0", None, found.attention, "1")]
    kinds += [("mean", name, estimate, "nats") for name, estimate in found.mean.items()]
    kinds += [("power", name, estimate, "nats²") for name, estimate in found.power.items()]
    for quantity, name, estimate, unit in kinds:
        yield from _cells(estimate, found.queries, "query", quantity=quantity, component=name, unit=unit)


def _offsets(source: Source) -> Iterator[Record]:
    """The head panel's logits by offset."""
    found = source.curves
    for queries, estimate in (("early", found.early), ("reference", found.late)):
        if estimate is not None:
            yield from _cells(estimate, found.offsets, "offset", queries=queries, quantity="logit", unit="nats")


def _cells(estimate: Estimate, places: list[int], axis: str, **more: Any) -> Iterator[Record]:
    for layer, head, k in np.ndindex(estimate.value.shape):
        yield _row(estimate[layer, head, k], layer=layer, head=head, **{axis: places[k]}, **more)


def _claims(source: Source) -> Iterator[Record]:
    names = (
        "number",
        "id",
        "claim",
        "verdict",
        "effect",
        "low",
        "high",
        "unit",
        "n",
        "no_effect",
        "side",
        "method",
        "reason",
    )
    for entry in source.claims or []:
        yield {name: entry[name] for name in names}


def _edits(source: Source) -> Iterator[Record]:
    """Power after / before each edit."""
    for edit in edited(source.claims):
        for name, cell in edit["ratios"].items():
            yield {
                "edit": edit["id"], "about": edit["about"], "power": name, "ratio": cell["value"], "low": cell["low"],
                "high": cell["high"], "n": edit["n"], "attention_before": edit["attention"][0],
                "attention_after": edit["attention"][1],
            }  # fmt: skip


def _sink_heads(source: Source) -> Iterator[Record]:
    for head in source.origin["reading"]["heads"] if source.origin else []:
        for name in ("at_0", "written", "spread", "positional", "along"):
            yield {"layer": head["layer"], "call": head["call"], "head": head["head"], "quantity": name, **head[name]}


def _trajectory(source: Source) -> Iterator[Record]:
    if source.origin is None:
        return
    path, portrait = source.origin["trajectory"], source.origin["portrait"]
    for depth, norm in enumerate(path["norm"]):
        yield {
            "depth": depth, "norm": norm, "relative": path["relative"][depth],
            "cosine_to_middle": path["middle"][depth], "body_norm": path["body"]["median_norm"][depth],
            "body_cosine": path["body"]["alike"][depth],
            "first_tokens_cosine": portrait["among"]["value"][depth], "low": portrait["among"]["low"][depth],
            "high": portrait["among"]["high"][depth], "to_reference": portrait["to_reference"]["value"][depth],
        }  # fmt: skip


def _portrait(source: Source) -> Iterator[Record]:
    if source.arrays is None:
        return
    picture = source.arrays["picture"].values
    for k, (token, spelled) in enumerate(zip(source.arrays["token"].values, source.arrays["spelled"].values)):
        for depth, (x, y) in enumerate(picture[k].tolist()):
            yield {"token": int(token), "spelled": str(spelled), "reference": k == 0, "depth": depth, "x": x, "y": y}


def _comparison(found: Sequence[Source]) -> Iterator[Record]:
    compared = comparison(found)
    for row in compared.rows:
        for name, cell in row.cells.items():
            minus = None if row.minus is None else compared.labels[row.minus]
            yield {"run": compared.labels[row.run], "minus": minus, "paired": row.paired} | _row(
                cell, queries=row.queries, quantity=name, unit=QUANTITIES[name]
            )


def _row(estimate: Estimate, **more: Any) -> Record:
    return {**more, **plain(estimate)}
