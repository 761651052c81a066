"""The numbers that are shown: per layer, per head, for early queries and for all, each with its interval and n."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Float64, Int64

from posleak.arrays import Array
from posleak.axes import EARLY, PARTS, QUERY, SCALING

from .dataset import component, components
from .power import gram_matrix
from .profile import sink_width
from .sampled import Estimate, Jackknife

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
        return cls.of_components({name: component(data, name) for name in components(data)}, SHARED, early)

    @classmethod
    def of_components(
        cls, found: Mapping[str, Float64[xr.DataArray, "B L H Q D"]], shared: Collection[str], early: bool = False
    ) -> Grams:
        """Of any components, `total` among them; those in `shared` have a share of it."""
        x = {name: _flat(c.sel({QUERY: c[QUERY] < EARLY}) if early else c) for name, c in found.items()}
        own = {name: gram_matrix(values, values) for name, values in x.items()}
        return cls(own, {name: gram_matrix(x[name], x["total"]) for name in x if name in shared})

    def averaged(self, axes: tuple[int, ...]) -> Grams:
        """Mean over heads (axis 1) or over layers and heads (axes 0, 1); heads that do not exist are left out."""
        return Grams(*({n: np.nanmean(g, axis=axes) for n, g in d.items()} for d in (self.own, self.with_total)))


def _flat(x: Float64[xr.DataArray, "B L H Q D"]) -> Float64[np.ndarray, "B L H pairs=Q*D"]:
    values: Array = x.values
    return values.reshape(*values.shape[:3], -1)


@dataclass(frozen=True)
class Shares:
    """Powers in nats² and shares of the total, for the cells that the Gram matrices have."""

    power: dict[str, Estimate]
    share: dict[str, Estimate]

    @classmethod
    def of(cls, grams: Grams, jackknife: Jackknife) -> Shares:
        total = jackknife.inner(grams.own["total"])
        return cls(
            power={name: jackknife.inner(gram).estimate for name, gram in grams.own.items()},
            share={name: jackknife.inner(gram).over(total).estimate for name, gram in grams.with_total.items()},
        )


@dataclass(frozen=True)
class Numbers(Shares):
    """The same of a measurement, with the stabilisation factor: what the mask would do without the sink, over what it
    does."""

    stabilisation: Estimate

    @classmethod
    def of(cls, grams: Grams, jackknife: Jackknife) -> Numbers:
        found = Shares.of(grams, jackknife)
        without, mask = (jackknife.inner(grams.own[name]) for name in ("mask_without_sink", "mask"))
        return cls(found.power, found.share, without.over(mask).estimate)


@dataclass(frozen=True)
class Summary:
    """A measurement in numbers.

    heads   cells [L, H], early and all queries
    layers  cells [L], means over heads
    model   one cell, the mean over all heads of all layers
    profile          mean attention of the reference queries to each of the first positions, cells [L, H, first]
    layer_profile    the same, means over heads [L, first]
    layer_ordinary   the same to one ordinary far key [L]; NaN where none is seen
    sink_attention, layer_sink_attention   its first column: attention to position 0
    width            how many first positions the sink of a head takes, by the median over prompts [L, H]
    """

    heads: dict[str, Numbers]
    layers: dict[str, Numbers]
    model: dict[str, Numbers]
    profile: Estimate
    layer_profile: Estimate
    layer_ordinary: Estimate
    width: Int64[np.ndarray, "L H"]
    prompts: int

    @property
    def sink_attention(self) -> Estimate:
        """Mean attention of the reference queries to position 0, by layer and head [L, H]."""
        return self.profile[..., 0]

    @property
    def layer_sink_attention(self) -> Estimate:
        """The same, means over heads [L]."""
        return self.layer_profile[..., 0]


def summarise(data: xr.Dataset, grams: dict[str, Grams]) -> Summary:
    """All numbers of a measurement from its Gram matrices; all leave out the same prompts, so that they are paired."""
    jackknife = Jackknife(data.sizes["prompt"])
    profile, ordinary = data["profile"].values, data["ordinary"].values
    return Summary(
        heads={queries: Numbers.of(g, jackknife) for queries, g in grams.items()},
        layers={queries: Numbers.of(g.averaged((1,)), jackknife) for queries, g in grams.items()},
        model={queries: Numbers.of(g.averaged((0, 1)), jackknife) for queries, g in grams.items()},
        profile=jackknife.mean(profile).estimate,
        layer_profile=jackknife.mean(np.nanmean(profile, axis=2)).estimate,
        layer_ordinary=jackknife.mean(_mean_over_heads(ordinary)).estimate,
        width=sink_width(np.median(profile, axis=0), np.median(ordinary, axis=0)),
        prompts=data.sizes["prompt"],
    )


def _mean_over_heads(x: Float64[np.ndarray, "B L H"]) -> Float64[np.ndarray, "B L"]:
    """Of the heads that have a number; NaN without any."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.nansum(x, axis=2) / np.isfinite(x).sum(2))


def tidy(summary: Summary) -> Iterator[dict[str, Any]]:
    """One record per number and head: layer, head, queries, quantity, component, value, low, high, unit, n."""
    for queries, numbers in summary.heads.items():
        for name, estimate in numbers.power.items():
            yield from _records(estimate, queries, "power", name, "nats²")
        for name, estimate in numbers.share.items():
            yield from _records(estimate, queries, "share", name, "1")
        yield from _records(numbers.stabilisation, queries, "stabilisation", None, "1")
    yield from _records(summary.sink_attention, "reference", "sink_attention", None, "1")


def by_head(summary: Summary) -> pd.DataFrame:
    """The powers of all queries and the attention to position 0 as a table, one row per head that exists: most leakage
    first; a head without a number for it comes last."""
    rows, units = dict[tuple[int, int], dict[str, Any]](), dict[str, str]()
    for number in tidy(summary):
        if (number["quantity"], number["queries"]) in (("power", "all"), ("sink_attention", "reference")):
            name, place = number["component"] or number["quantity"], (number["layer"], number["head"])
            units[name] = number["unit"]
            row = rows.setdefault(place, dict(zip(("layer", "head"), place)))
            row |= {name: number["value"], f"{name}_low": number["low"], f"{name}_high": number["high"]}
    table = pd.DataFrame([row | {"n": summary.prompts} for row in rows.values()]).dropna(subset=["sink_attention"])
    table = table.sort_values("total", ascending=False, kind="stable", ignore_index=True)
    table.attrs["units"] = units
    return table


def _records(estimate: Estimate, queries: str, quantity: str, name: str | None, unit: str) -> Iterator[dict[str, Any]]:
    for layer, head in np.ndindex(estimate.value.shape):
        cell = estimate[layer, head]
        yield {
            "layer": layer, "head": head, "queries": queries, "quantity": quantity, "component": name,
            "value": float(cell.value), "low": float(cell.low), "high": float(cell.high), "unit": unit, "n": cell.n,
        }  # fmt: skip
