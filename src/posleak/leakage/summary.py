"""Results of a measurement: powers and shares of the model, its layers and its heads, with intervals; and the sink
profile: attention of late queries to the first positions, the width of the sink, and whether the origin covers it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Bool, Float64, Int64

from posleak.arrays import Array
from posleak.axes import EARLY, HEAD, LAYER, PARTS, QUERY, SCALING, format_layers, layer_coordinates, layer_names
from posleak.show.notebook import compact_html

from .contrast import Contrast
from .power import by_cell, sum_products
from .sampled import POWER_UNIT, SHARE_UNIT, Estimate, Jackknife, LabelledEstimate

SHARED = (*PARTS, "residual", SCALING)
"""Components that have a share of the total."""

HEAD_COLUMNS = (
    "layer", "call", "head", "queries", "norm", "quantity", "component", "value", "low", "high", "unit", "n",
)  # fmt: skip
"""Columns of heads.parquet: `layer` is the model's layer id, `call` the index of the attention call."""

SINK_RATIO, SINK_ATTENTION = 5.0, 0.02
"""A position belongs to a sink if late queries attend to it more than SINK_RATIO times as much as to an ordinary far
key, and with more than SINK_ATTENTION of all their attention."""

KEYS_AFTER_ORIGIN = 8
"""Number of keys after the origin that are examined to decide whether the origin is wide enough."""

QUERIES = ("all", "early")

LEADING, EVEN = NORMS = ("attention", "even")
"""The norms: weights of the pairs (i, δ) in a power. LEADING: mean over i of Σ_δ w(δ) E[x]², where w(δ) is the
attention of a head's references to the body keys whose offsets are nearest to δ. EVEN: every pair counts the same."""

STABILISATION, ORDER = "stabilisation", "order"
"""Ratios of products that are not shares of a part."""


class PowerKey(NamedTuple):
    """The name of one power of a model, such as ("attention", "all", "mask")."""

    norm: str
    queries: str
    component: str


Sums = Float64[np.ndarray, "*cells sums"]


@dataclass(frozen=True)
class Products:
    """Products of prompts (power.py) of one set of queries: `own[c]` of component c with itself, `with_total[c]` with
    the total.

    Cells are [L, H]. A layer's products, [L], are the mean over its heads; the model's, [], the mean over all heads.
    The norm is LEADING; `even` has the same products in the norm EVEN.
    """

    own: dict[str, Sums]
    with_total: dict[str, Sums]
    even: Products | None = None

    @classmethod
    def by_queries(
        cls,
        components: Mapping[str, Float64[xr.DataArray, "B L H Q D"]],
        weight: Float64[xr.DataArray, "B L H D"],
        shared: Collection[str] = SHARED,
    ) -> dict[str, Products]:
        """Return the products of early and of all queries, in both norms.

        components   arrays with the same existing pairs, `total` among them;  shared: those with a share of the total
        weight       attention of the references by offset; the pairs are weighted by its mean over prompts
        """
        total = components["total"]
        Q, D = total.shape[-2:]
        early = int((total[QUERY].values < EARLY).sum())  # queries increase: early ones come first
        exists = np.isfinite(_flat(total)[0])  # [L, H, pairs]
        x = {name: by_cell(_flat(c), exists) for name, c in components.items()}  # [L, H, B, pairs]
        even = cls._of_norm(x, shared, early * D, exists)
        root = np.nan_to_num(np.sqrt(weight.values.mean(0)))[:, :, None, :]  # [L, H, 1, D]
        for values in x.values():
            values.reshape(*values.shape[:-1], Q, D)[...] *= root[..., None, :]
        attention = cls._of_norm(x, shared, early, exists.reshape(*exists.shape[:2], Q, D).any(-1))
        return {queries: replace(products, even=even[queries]) for queries, products in attention.items()}

    @classmethod
    def _of_norm(
        cls,
        x: Mapping[str, Float64[np.ndarray, "L H B pairs"]],
        shared: Collection[str],
        early: int,
        counted: Bool[np.ndarray, "L H counted"],
    ) -> dict[str, Products]:
        """Return the products of weighted components, divided by the number of `counted` pairs or queries.

        early: how many of the first ones belong to early queries
        """
        split = early * (next(iter(x.values())).shape[-1] // counted.shape[-1])
        counts = {"early": counted[..., :early].sum(-1)[..., None], "all": counted.sum(-1)[..., None]}

        def products(one: str, other: str) -> dict[str, Sums]:
            first, rest = (
                sum_products(x[one][..., span], x[other][..., span]) for span in (slice(0, split), slice(split, None))
            )
            with np.errstate(invalid="ignore"):
                return {"early": first / counts["early"], "all": (first + rest) / counts["all"]}

        own = {name: products(name, name) for name in x}
        with_total = {name: products(name, "total") for name in x if name in shared}
        return {
            queries: cls(
                {name: sums[queries] for name, sums in own.items()},
                {name: sums[queries] for name, sums in with_total.items()},
            )
            for queries in counts
        }

    @property
    def norms(self) -> dict[str, Products]:
        """The products by the name of their norm, the leading one first."""
        return {LEADING: self} | ({} if self.even is None else {EVEN: self.even})

    def averaged(self, axes: tuple[int, ...]) -> Products:
        """Return the mean over heads (axis 1) or layers and heads (axes 0, 1), ignoring heads that do not exist.

        Without axes, return the products of each head.
        """
        if not axes:
            return self
        own, with_total = (
            {name: np.nanmean(sums, axis=axes) for name, sums in kind.items()} for kind in (self.own, self.with_total)
        )
        return Products(own, with_total, None if self.even is None else self.even.averaged(axes))


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
    """Return the products of the whole model, means over layers and heads, in both norms, of all and early queries."""
    return {
        PowerKey(norm, queries, component): sums
        for queries in QUERIES
        for norm, of_norm in products[queries].averaged((0, 1)).norms.items()
        for component, sums in of_norm.own.items()
    }


@dataclass(frozen=True)
class Decomposition:
    """Powers in nats² and shares of the total, for the cells that the products have.

    ratios   further ratios of products: of a run `stabilisation`, the power that the mask part would have without the
             sink divided by the power that it has; of a trace `order`, the difference between the shares of `earlier`
             in the two orders of intervention
    even     the same in the norm EVEN; None in a decomposition that is in this norm itself
    """

    power: dict[str, Estimate]
    share: dict[str, Estimate]
    ratios: dict[str, Estimate] = field(default_factory=dict)
    even: Decomposition | None = None

    @classmethod
    def of(cls, products: Products, jackknife: Jackknife) -> Decomposition:
        """Estimate every power, share and ratio from the products of prompts."""
        powers = {name: jackknife.inner(sums) for name, sums in products.own.items()}
        shares = {
            name: jackknife.inner(sums).over(powers["total"]).estimate for name, sums in products.with_total.items()
        }
        ratios = {ORDER: shares.pop(ORDER)} if ORDER in shares else {}
        if {"mask", "mask_without_sink"} <= set(powers):
            ratios[STABILISATION] = powers["mask_without_sink"].over(powers["mask"]).estimate
        even = None if products.even is None else cls.of(products.even, jackknife)
        return cls({name: power.estimate for name, power in powers.items() if name != ORDER}, shares, ratios, even)

    @property
    def stabilisation(self) -> Estimate:
        """The stabilisation factor of a run."""
        return self.ratios[STABILISATION]

    def __getitem__(self, index: Any) -> Decomposition:
        """Return the estimates of some of the cells."""
        power, share, ratios = (
            {name: x[index] for name, x in part.items()} for part in (self.power, self.share, self.ratios)
        )
        return Decomposition(power, share, ratios, None if self.even is None else self.even[index])

    @property
    def norms(self) -> dict[str, Decomposition]:
        """The decompositions by the name of their norm, the leading one first."""
        return {LEADING: self} | ({} if self.even is None else {EVEN: self.even})

    def disagreement(self, names: Collection[str]) -> bool:
        """Return whether the two norms lead to different conclusions about these shares of one cell.

        They do if another part is the largest one, if the two intervals of a part do not overlap, or if the total is
        significantly above 0 in one norm only.
        """
        pairs = [] if self.even is None else [(self.share[n], self.even.share[n]) for n in names if n in self.share]
        values = np.array([[float(one.value), float(other.value)] for one, other in pairs])
        if not pairs or np.isnan(values).any():
            return bool(pairs) and len(set(np.isnan(values).any(0).tolist())) > 1
        apart = any(one.low > other.high or other.low > one.high for one, other in pairs)
        return apart or len(set(values.argmax(0).tolist())) > 1

    def labelled(self, **labels: Any) -> Iterator[LabelledEstimate]:
        """Yield every estimate of both norms with these labels, followed by norm, quantity, component and unit."""
        for norm, numbers in self.norms.items():
            for quantity, unit, estimates in (
                ("power", POWER_UNIT, numbers.power), ("share", SHARE_UNIT, numbers.share),
            ):  # fmt: skip
                for name, estimate in estimates.items():
                    named = {"norm": norm, "quantity": quantity, "component": name, "unit": unit}
                    yield LabelledEstimate(estimate, labels | named)
            for name, estimate in numbers.ratios.items():
                ratio = {"norm": norm, "quantity": name, "component": None, "unit": SHARE_UNIT}
                yield LabelledEstimate(estimate, labels | ratio)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form (docs/json.md): the leading norm in place, the other one under `even`."""
        own = {"power": self.power, "share": self.share, **self.ratios}
        return own if self.even is None else own | {EVEN: self.even.as_dict()}


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

    heads: dict[str, Decomposition]
    layers: dict[str, Decomposition]
    model: dict[str, Decomposition]
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

    def _repr_html_(self) -> str:
        """Return a compact table of shares with intervals, for notebooks."""
        facts = [f"{self.prompts} prompts", format_layers(self.layer_ids), f"{self.width.shape[1]} heads"]
        return compact_html("Summary", facts, self.model)

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
        heads={queries: Decomposition.of(p, jackknife) for queries, p in products.items()},
        layers={queries: Decomposition.of(p.averaged((1,)), jackknife) for queries, p in products.items()},
        model={queries: Decomposition.of(p.averaged((0, 1)), jackknife) for queries, p in products.items()},
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
    profile, ordinary = (data[name].mean(("prompt", HEAD), skipna=True).values for name in ("profile", "ordinary"))
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
    """Return the powers of all queries and the attention to position 0 in a table with a row per head that exists.

    Rows are sorted by total power, largest first; heads whose total power is NaN come last.
    """
    power, (call, head) = summary.heads["all"].power, np.indices(summary.width.shape).reshape(2, -1)
    columns: dict[str, Any] = {"layer": np.array(summary.layer_ids)[call], "call": call, "head": head}
    for name, estimate in (power | {"sink_attention": summary.sink_attention}).items():
        cells = estimate[call, head]
        columns |= {name: cells.value, f"{name}_low": cells.low, f"{name}_high": cells.high}
    table = pd.DataFrame(columns | {"n": summary.prompts}).dropna(subset=["sink_attention"])
    table = table.sort_values("total", ascending=False, kind="stable", ignore_index=True)
    table.attrs["units"] = dict.fromkeys(power, POWER_UNIT) | {"sink_attention": SHARE_UNIT}
    return table
