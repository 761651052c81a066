"""The numbers that are shown: per layer, per head, for early queries and for all, each with its interval and n."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float64

from posleak.arrays import Array
from posleak.axes import EARLY, PARTS, QUERY, SCALING

from .dataset import component, components
from .power import gram_matrix
from .sampled import Bootstrap, Estimate

SHARED = (*PARTS, "residual", SCALING)
"""Components that have a share of the total."""


@dataclass(frozen=True)
class Grams:
    """Gram matrices of one set of queries: `own[c]` of c with itself, `with_total[c]` of c with the total.

    Cells are [L, H]; everything below is arithmetic on them: a layer, [L], is the mean over its heads, a model, [], the
    mean over all heads.
    """

    own: dict[str, Float64[np.ndarray, "*cells B B"]]
    with_total: dict[str, Float64[np.ndarray, "*cells B B"]]

    @classmethod
    def of(cls, data: xr.Dataset, early: bool = False) -> Grams:
        if early:
            data = data.sel({QUERY: data[QUERY] < EARLY})
        x = {name: _flat(component(data, name)) for name in components(data)}
        own = {name: gram_matrix(values, values) for name, values in x.items()}
        return cls(own, {name: gram_matrix(x[name], x["total"]) for name in x if name in SHARED})

    def averaged(self, axes: tuple[int, ...]) -> Grams:
        """Mean over heads (axis 1) or over layers and heads (axes 0, 1); heads that do not exist are left out."""
        return Grams(*({n: np.nanmean(g, axis=axes) for n, g in d.items()} for d in (self.own, self.with_total)))


def _flat(x: Float64[xr.DataArray, "B L H Q D"]) -> Float64[np.ndarray, "B L H pairs=Q*D"]:
    values: Array = x.values
    return values.reshape(*values.shape[:3], -1)


@dataclass(frozen=True)
class Numbers:
    """Powers in nats², shares, and the stabilisation factor, for the cells that the Gram matrices have."""

    power: dict[str, Estimate]
    share: dict[str, Estimate]
    stabilisation: Estimate

    @classmethod
    def of(cls, grams: Grams, bootstrap: Bootstrap) -> Numbers:
        power = {name: bootstrap.inner(gram) for name, gram in grams.own.items()}
        return cls(
            power={name: number.estimate for name, number in power.items()},
            share={
                name: bootstrap.inner(gram).over(power["total"]).estimate for name, gram in grams.with_total.items()
            },
            stabilisation=power["mask_without_sink"].over(power["mask"]).estimate,
        )


@dataclass(frozen=True)
class Summary:
    """A measurement in numbers.

    heads   cells [L, H], early and all queries
    layers  cells [L], means over heads
    model   one cell, the mean over all heads of all layers
    sink_attention, layer_sink_attention   mean a_r0 over reference queries
    """

    heads: dict[str, Numbers]
    layers: dict[str, Numbers]
    model: dict[str, Numbers]
    sink_attention: Estimate
    layer_sink_attention: Estimate
    prompts: int


def summarise(data: xr.Dataset, grams: dict[str, Grams], seed: int = 0) -> Summary:
    """All numbers of a measurement from its Gram matrices; one set of bootstrap weights, so that they are paired."""
    bootstrap = Bootstrap.of(data.sizes["prompt"], seed)
    sink = data["sink_attention"].values
    return Summary(
        heads={queries: Numbers.of(g, bootstrap) for queries, g in grams.items()},
        layers={queries: Numbers.of(g.averaged((1,)), bootstrap) for queries, g in grams.items()},
        model={queries: Numbers.of(g.averaged((0, 1)), bootstrap) for queries, g in grams.items()},
        sink_attention=bootstrap.mean(sink).estimate,
        layer_sink_attention=bootstrap.mean(np.nanmean(sink, axis=2)).estimate,
        prompts=data.sizes["prompt"],
    )


CANCELLING = 10.0
"""Where drift and sink are both so many times larger than their sum, by their intervals, only the sum says much."""


def cancelling_layers(summary: Summary) -> list[int]:
    """Layers where drift and sink are large and opposite, so that only their sum, the residual, means something.

    Drift keeps the late query's position-0 term while the body is swapped. Where rows of logits differ by hundreds of
    nats as a whole, which no softmax sees, that term and the body are not on one scale (docs/definitions.md).
    """
    power = summary.layers["all"].power
    both = np.minimum(power["drift"].low, power["sink"].low)
    left = np.maximum(power["residual"].high, power["total"].high)
    return np.flatnonzero((both > CANCELLING * left) & (left > 0)).tolist()


def tidy(summary: Summary) -> Iterator[dict[str, Any]]:
    """One record per number and head: layer, head, queries, quantity, component, value, low, high, unit, n."""
    for queries, numbers in summary.heads.items():
        for name, estimate in numbers.power.items():
            yield from _records(estimate, queries, "power", name, "nats²")
        for name, estimate in numbers.share.items():
            yield from _records(estimate, queries, "share", name, "1")
        yield from _records(numbers.stabilisation, queries, "stabilisation", None, "1")
    yield from _records(summary.sink_attention, "reference", "sink_attention", None, "1")


def _records(estimate: Estimate, queries: str, quantity: str, name: str | None, unit: str) -> Iterator[dict[str, Any]]:
    for layer, head in np.ndindex(estimate.value.shape):
        cell = estimate[layer, head]
        yield {
            "layer": layer, "head": head, "queries": queries, "quantity": quantity, "component": name,
            "value": float(cell.value), "low": float(cell.low), "high": float(cell.high), "unit": unit, "n": cell.n,
        }  # fmt: skip
