"""Curves of every head, with intervals over prompts.

mean         expectation over prompts, averaged over offsets, of each component at each query; parts add up to the total
power        unbiased power of each component at each query, averaged over offsets; nothing cancels
attention    a_i0 by query
early, late  mean logit by offset, over the queries before EARLY and over the reference queries
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
    """Return mask, drift and sink, and scaling if the model scales its queries by position."""
    return (*PARTS, SCALING) if SCALING in data else PARTS


@dataclass(frozen=True)
class Curves:
    """Components [L, H, Q], attention [L, H, Q], and logits of early and late queries [L, H, D]."""

    queries: list[int]
    offsets: list[int]
    mean: dict[str, Estimate]
    power: dict[str, Estimate]
    attention: Estimate
    early: Estimate
    late: Estimate


def curves(data: xr.Dataset) -> Curves:
    """Compute the curves of all heads, one layer at a time to limit memory."""
    jackknife = Jackknife(data.sizes["prompt"])
    layers = [_layer(data.isel({LAYER: [layer]}), jackknife) for layer in range(data.sizes[LAYER])]
    joined = {key: Estimate.concatenate([layer[key] for layer in layers]) for key in layers[0]}
    mean, power = ({name: joined[kind, name] for name in ("total", *parts(data))} for kind in ("mean", "power"))
    others = (joined[name, ""] for name in ("attention", "early", "late"))
    return Curves(data["query"].values.tolist(), data["offset"].values.tolist(), mean, power, *others)


def _layer(layer: xr.Dataset, jackknife: Jackknife) -> dict[tuple[str, str], Estimate]:
    """Estimates by kind and component; logits s_i(δ) = drift + renormalisation + logit of queries that have the key."""
    found = {}
    for name in ("total", *parts(layer)):
        x = component(layer, name).values  # [B, 1, H, Q, D]
        found["mean", name] = jackknife.mean(nan_mean(x, -1)).estimate
        found["power", name] = jackknife.inner(products(x, x)).estimate
    found["attention", ""] = jackknife.mean(layer["attention_0"].values).estimate
    s = (layer["drift"] + layer["renormalisation"] + layer["logit"]).where(layer["pairs"])
    s = s.transpose("prompt", "layer", "head", "query", "offset").sel(query=layer["query"] < EARLY)
    found["early", ""] = jackknife.mean(nan_mean(s.values, -2)).estimate
    found["late", ""] = jackknife.mean(layer["logit"].values).estimate
    return found


def nan_mean(x: Array, axis: int) -> Array:
    """Return the mean of the finite values; NaN if there are none."""
    finite = np.isfinite(x)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(finite, x, 0.0).sum(axis) / finite.sum(axis))
