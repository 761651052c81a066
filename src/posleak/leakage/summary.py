"""Results of a measurement: powers and shares of the model, its layers and its heads, with intervals; and the sink
profile: attention of late queries to the first positions, the width of the sink, and whether the origin covers it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float64, Int64

from posleak.arrays import Array
from posleak.axes import EARLY, HEAD, LAYER, PARTS, PROMPT, QUERY, SCALING, layer_coordinates, layer_names

from .contrast import Contrast
from .power import by_cell, products_of
from .sampled import POWER_UNIT, SHARE_UNIT, Estimate, Jackknife, LabelledEstimate

SHARED = (*PARTS, "residual", SCALING)
"""Components that have a share of the total."""

HEAD_COLUMNS = (
    "layer", "call", "head", "queries", "quantity", "component", "value", "low", "high", "unit", "n",
)  # fmt: skip
"""Columns of heads.parquet: `layer` is the model's layer id, `call` the index of the attention call."""

SINK_RATIO, SINK_ATTENTION = 5.0, 0.02
"""A position belongs to a sink if late queries attend to it more than SINK_RATIO times as much as to an ordinary far
key, and with more than SINK_ATTENTION of all their attention."""

KEYS_AFTER_ORIGIN = 8
"""Number of keys after the origin that are examined to decide whether the origin is wide enough."""

QUERIES = ("all", "early")

PowerKey = tuple[str, str]
"""(queries, component): names one power of a model, such as ("all", "mask")."""

Sums = Float64[np.ndarray, "*cells sums"]


@dataclass(frozen=True)
class Products:
    """Products of prompts (power.py) of one set of queries: `own[c]` of component c with itself, `with_total[c]` with
    the total.

    Cells are [L, H]. A layer's products, [L], are the mean over its heads; the model's, [], the mean over all heads.
    """

    own: dict[str, Sums]
    with_total: dict[str, Sums]

    @classmethod
    def by_queries(
        cls, components: Mapping[str, Float64[xr.DataArray, "B L H Q D"]], shared: Collection[str] = SHARED
    ) -> dict[str, Products]:
        """Return the products of early and of all queries.

        components: arrays with the same existing pairs, `total` among them; shared: those that have a share of it
        """
        total = components["total"]
        early = int((total[QUERY].values < EARLY).sum()) * total.shape[-1]  # queries increase: early ones come first
        exists = np.isfinite(_flat(total)[0])  # [L, H, pairs]
        x = {name: by_cell(_flat(c), exists) for name, c in components.items()}  # [L, H, B, pairs]
        products = {}
        for queries, end in {"early": early, "all": exists.shape[-1]}.items():
            count, some = exists[..., :end].sum(-1), {name: values[..., :end] for name, values in x.items()}
            own = {name: products_of(values, values, count) for name, values in some.items()}
            with_total = {name: products_of(some[name], some["total"], count) for name in some if name in shared}
            products[queries] = cls(own, with_total)
        return products

    def averaged(self, axes: tuple[int, ...]) -> Products:
        """Return the mean over heads (axis 1) or layers and heads (axes 0, 1), ignoring heads that do not exist."""
        return Products(*({n: np.nanmean(g, axis=axes) for n, g in d.items()} for d in (self.own, self.with_total)))


def _flat(x: Float64[xr.DataArray, "B L H Q D"]) -> Float64[np.ndarray, "B L H pairs"]:
    values: Array = x.values
    return values.reshape(*values.shape[:3], -1)


def contrasts(
    after: Mapping[PowerKey, Sums], before: Mapping[PowerKey, Sums], prompts: int
) -> dict[PowerKey, Contrast]:
    """Return the paired contrast of every power that both have, from their products (power.py) of the same prompts."""
    jackknife = Jackknife(prompts)
    return {
        key: Contrast(jackknife.inner(sums), jackknife.inner(before[key]))
        for key, sums in after.items()
        if key in before
    }


def model_products(products: Mapping[str, Products]) -> dict[PowerKey, Sums]:
    """Return the products of the whole model, means over layers and heads, of all and of early queries."""
    return {
        (queries, component): sums
        for queries in QUERIES
        for component, sums in products[queries].averaged((0, 1)).own.items()
    }


@dataclass(frozen=True)
class Decomposition:
    """Powers in nats² and shares of the total, for the cells that the products have."""

    power: dict[str, Estimate]
    share: dict[str, Estimate]

    @classmethod
    def of(cls, products: Products, jackknife: Jackknife) -> Decomposition:
        """Estimate every power and share from the products of prompts."""
        total = jackknife.inner(products.own["total"])
        return cls(
            power={name: jackknife.inner(sums).estimate for name, sums in products.own.items()},
            share={name: jackknife.inner(sums).over(total).estimate for name, sums in products.with_total.items()},
        )

    def __getitem__(self, index: Any) -> Decomposition:
        """Return the estimates of some of the cells."""
        return Decomposition(*({name: x[index] for name, x in part.items()} for part in (self.power, self.share)))

    def labelled(self, **labels: Any) -> Iterator[LabelledEstimate]:
        """Yield every estimate with these labels, followed by quantity, component and unit."""
        for quantity, unit, estimates in (("power", POWER_UNIT, self.power), ("share", SHARE_UNIT, self.share)):
            for name, estimate in estimates.items():
                yield LabelledEstimate(estimate, labels | {"quantity": quantity, "component": name, "unit": unit})


@dataclass(frozen=True)
class LeakageDecomposition(Decomposition):
    """Powers and shares of mask, drift and sink, with the stabilisation factor: the power that the mask part would have
    without the sink, divided by the power that it has."""

    stabilisation: Estimate

    @classmethod
    def of(cls, products: Products, jackknife: Jackknife) -> LeakageDecomposition:
        """Estimate every power, every share and the stabilisation factor from the products of prompts."""
        parts = Decomposition.of(products, jackknife)
        without, mask = (jackknife.inner(products.own[name]) for name in ("mask_without_sink", "mask"))
        return cls(parts.power, parts.share, without.over(mask).estimate)

    def __getitem__(self, index: Any) -> LeakageDecomposition:
        parts = super().__getitem__(index)
        return LeakageDecomposition(parts.power, parts.share, self.stabilisation[index])

    def labelled(self, **labels: Any) -> Iterator[LabelledEstimate]:
        yield from super().labelled(**labels)
        labels |= {"quantity": "stabilisation", "component": None, "unit": SHARE_UNIT}
        yield LabelledEstimate(self.stabilisation, labels)


@dataclass(frozen=True)
class Summary:
    """All results of a measurement.

    heads            decompositions with cells [L, H], of early and of all queries
    layers           the same with cells [L], means over heads
    model            the same with one cell, means over all heads of all layers
    profile          mean attention of the reference queries to each of the first positions [L, H, first]
    layer_profile    its mean over heads [L, first]
    layer_ordinary   mean attention of the reference queries to one ordinary far key [L]; NaN where none is visible
    width            sink width of each head, from medians over prompts [L, H]
    layer_ids        the model's layer id of each attention call [L]
    """

    heads: dict[str, LeakageDecomposition]
    layers: dict[str, LeakageDecomposition]
    model: dict[str, LeakageDecomposition]
    profile: Estimate
    layer_profile: Estimate
    layer_ordinary: Estimate
    width: Int64[np.ndarray, "L H"]
    prompts: int
    layer_ids: tuple[int, ...]

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the layers in tables and figures."""
        return layer_names(self.layer_ids)

    @property
    def places(self) -> Array:
        """Coordinates of the layers on an axis."""
        return np.array(layer_coordinates(self.layer_ids))

    @property
    def sink_attention(self) -> Estimate:
        """Mean attention of the reference queries to position 0, by layer and head [L, H]."""
        return self.profile[..., 0]

    @property
    def layer_sink_attention(self) -> Estimate:
        """Mean attention of the reference queries to position 0, by layer [L], mean over heads."""
        return self.layer_profile[..., 0]


def summarise(data: xr.Dataset, products: dict[str, Products]) -> Summary:
    """Compute all results of a measurement; they are paired, because all leave out the same prompts."""
    jackknife = Jackknife(data.sizes["prompt"])
    profile, ordinary = data["profile"].values, data["ordinary"].values
    return Summary(
        heads={queries: LeakageDecomposition.of(p, jackknife) for queries, p in products.items()},
        layers={queries: LeakageDecomposition.of(p.averaged((1,)), jackknife) for queries, p in products.items()},
        model={queries: LeakageDecomposition.of(p.averaged((0, 1)), jackknife) for queries, p in products.items()},
        profile=jackknife.mean(profile).estimate,
        layer_profile=jackknife.mean(np.nanmean(profile, axis=2)).estimate,
        layer_ordinary=jackknife.mean(finite_mean(ordinary)).estimate,
        width=sink_width(np.median(profile, axis=0), np.median(ordinary, axis=0)),
        prompts=data.sizes["prompt"],
        layer_ids=tuple(data[LAYER].values.tolist()),
    )


def finite_mean(x: Float64[np.ndarray, "*cells H"]) -> Float64[np.ndarray, "*cells"]:
    """Return the mean of the finite values over the last axis; NaN if there is none."""
    x = np.ascontiguousarray(x)  # sums do not depend on the layout of x
    finite = np.isfinite(x)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(finite, x, 0.0).sum(-1) / finite.sum(-1))


def sink_width(
    profile: Float64[np.ndarray, "*cells first"], ordinary: Float64[np.ndarray, "*cells"]
) -> Int64[np.ndarray, "*cells"]:
    """Return the number of leading positions up to the last one that belongs to a sink; 0 if none does."""
    in_sink = (profile > SINK_ATTENTION) & (profile > SINK_RATIO * np.nan_to_num(ordinary)[..., None])
    widths = np.arange(1, profile.shape[-1] + 1)
    return np.asarray(np.where(in_sink, widths, 0).max(-1), dtype=np.int64)


def narrow_layers(data: xr.Dataset, origin: int) -> dict[int, int]:
    """Return the attention calls whose sink extends beyond the origin, each with an origin width that would suffice.

    These are calls in which the keys m … m+7 receive on average more than 5 times the attention of an ordinary key, and
    together more than 0.02 of all attention, in the mean over prompts and heads. A width at the end of the profile is a
    lower bound.
    """
    profile, ordinary = (data[name].mean((PROMPT, HEAD), skipna=True).values for name in ("profile", "ordinary"))
    widths = {}
    for call, (row, far) in enumerate(zip(profile, np.nan_to_num(ordinary), strict=True)):
        last = len(row) - KEYS_AFTER_ORIGIN
        after = [row[m : m + KEYS_AFTER_ORIGIN] for m in range(origin, last + 1)]
        in_sink = [bool(keys.sum() > SINK_ATTENTION and keys.mean() > SINK_RATIO * far) for keys in after]
        if in_sink and in_sink[0]:
            widths[call] = origin + (in_sink.index(False) if False in in_sink else last - origin)
    return widths


def tidy(summary: Summary) -> Iterator[dict[str, Any]]:
    """Yield the rows of heads.parquet (HEAD_COLUMNS): one per quantity, component, set of queries, call and head."""
    labels = {"queries": "reference", "quantity": "sink_attention", "unit": SHARE_UNIT}
    numbers = [number for queries, heads in summary.heads.items() for number in heads.labelled(queries=queries)]
    for number in [*numbers, LabelledEstimate(summary.sink_attention, labels)]:
        for cell in number.cells("call", "head"):
            yield cell.as_row(HEAD_COLUMNS, layer=summary.layer_ids[cell.labels["call"]])


def by_head(summary: Summary) -> pd.DataFrame:
    """Return the powers of all queries and the attention to position 0 as a table with one row per existing head.

    Rows are sorted by total power, largest first; heads whose total power is NaN come last.
    """
    power, (call, head) = summary.heads["all"].power, np.indices(summary.width.shape).reshape(2, -1)
    columns: dict[str, Any] = {"layer": np.array(summary.layer_ids)[call], "head": head}
    for name, estimate in (power | {"sink_attention": summary.sink_attention}).items():
        cells = estimate[call, head]
        columns |= {name: cells.value, f"{name}_low": cells.low, f"{name}_high": cells.high}
    table = pd.DataFrame(columns | {"n": summary.prompts})
    table = table.drop_duplicates(["layer", "head"], keep="last").dropna(subset=["sink_attention"])
    table = table.sort_values("total", ascending=False, kind="stable", ignore_index=True)
    table.attrs["units"] = dict.fromkeys(power, POWER_UNIT) | {"sink_attention": SHARE_UNIT}
    return table
