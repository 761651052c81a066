"""The curves of every head, with intervals over prompts: what the page draws when a head is chosen.

mean        E over prompts, mean over offsets, of each component at each query; the parts add up to the total
power       unbiased power of each component at each query, mean over offsets: shows also what cancels in the mean
attention   a_i0 by query
early, late mean logit by offset, over the queries before 32 and over the reference queries
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr

from posleak.arrays import Array
from posleak.axes import EARLY, LAYER, PARTS, SCALING
from posleak.leakage import Estimate, Jackknife, component
from posleak.leakage.power import products


def parts(data: xr.Dataset) -> tuple[str, ...]:
    """mask, drift and sink; and scaling, for a model that scales its queries by position."""
    return (*PARTS, SCALING) if SCALING in data else PARTS


@dataclass(frozen=True)
class Curves:
    """mean, power: for each shown component [L, H, Q]; attention [L, H, Q]; early, late [L, H, D]."""

    queries: list[int]
    offsets: list[int]
    mean: dict[str, Estimate]
    power: dict[str, Estimate]
    attention: Estimate
    early: Estimate
    late: Estimate


def curves(data: xr.Dataset) -> Curves:
    """All heads, layer by layer: samples of one layer are all that is in memory at once."""
    jackknife = Jackknife(data.sizes["prompt"])
    layers = [data.isel({LAYER: [layer]}) for layer in range(data.sizes[LAYER])]
    found = [_parts(layer, jackknife) for layer in layers]
    logits = [_logits(layer, jackknife) for layer in layers]
    return Curves(
        queries=data["query"].values.tolist(), offsets=data["offset"].values.tolist(),
        mean={name: Estimate.concatenate([mean[name] for mean, _ in found]) for name in found[0][0]},
        power={name: Estimate.concatenate([power[name] for _, power in found]) for name in found[0][1]},
        attention=Estimate.concatenate([jackknife.mean(layer["attention_0"].values).estimate for layer in layers]),
        early=Estimate.concatenate([early for early, _ in logits]),
        late=Estimate.concatenate([late for _, late in logits]),
    )  # fmt: skip


def _parts(layer: xr.Dataset, jackknife: Jackknife) -> tuple[dict[str, Estimate], dict[str, Estimate]]:
    x = {name: component(layer, name).values for name in ("total", *parts(layer))}  # [B, 1, H, Q, D]
    mean = {name: jackknife.mean(nan_mean(values, -1)).estimate for name, values in x.items()}
    return mean, {name: jackknife.inner(products(values, values)).estimate for name, values in x.items()}


def _logits(layer: xr.Dataset, jackknife: Jackknife) -> tuple[Estimate, Estimate]:
    """s_i(δ) = drift + renormalisation + logit, averaged over the early queries that have a key there; and s_r(δ)."""
    s = (layer["drift"] + layer["renormalisation"] + layer["logit"]).where(layer["pairs"])
    s = s.transpose("prompt", "layer", "head", "query", "offset").sel(query=layer["query"] < EARLY)
    return jackknife.mean(nan_mean(s.values, -2)).estimate, jackknife.mean(layer["logit"].values).estimate


def nan_mean(x: Array, axis: int) -> Array:
    """The mean of the finite numbers; NaN where there is none."""
    there = np.isfinite(x)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(there, x, 0.0).sum(axis) / there.sum(axis))
