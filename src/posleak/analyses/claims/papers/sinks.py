"""The claims of arXiv 2508.02546: attention sinks are the anchors of reference frames.

Frames are read off each layer's attention, averaged over its heads; docs/metrics.md has the measures. The last
sentence of the abstract, on what its view is good for, is a judgement and has no entry.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import xarray as xr
from jaxtyping import Float64

from posleak.analyses.claims import catalogue
from posleak.analyses.claims.finding import Detail, Finding
from posleak.analyses.claims.lab import LATER, Lab
from posleak.arrays import Array
from posleak.leakage import Sampled
from posleak.leakage.across import correlated
from posleak.metrics.table import EDGE_THRESHOLD, SINK_THRESHOLD
from posleak.papers import SINKS

claim = partial(catalogue.claim, paper=SINKS)
untestable = partial(catalogue.untestable, paper=SINKS)

TYPES = ("centralized", "distributed", "bidirectional")

MOST = 0.5
"""Attention to a tenth of the keys that is more than all others get together."""

ONE_LAYER = "the model has one attention layer"
NO_ANCHOR = "no layer has an anchor: no key receives clearly more attention than others"


def even(tokens: int) -> float:
    """What the most-read tenth of the keys receives if every query reads itself and all keys before it alike.

    It is the first tenth, which most queries see: key j receives Σ_{i>j} 1 / (i + 1) from the others.
    """
    received = np.cumsum(1 / np.arange(tokens, 0, -1))[::-1] - 1 / np.arange(1, tokens + 1)
    most = tokens - math.ceil(0.9 * (tokens - 1))
    return float(received[:most].sum() / received.sum())


def later(lab: Lab, name: str) -> Float64[np.ndarray, "B later *rest"]:
    """A number of the layers after the first, by prompt."""
    return lab.metric(name)[:, LATER]


def concentrated(lab: Lab) -> Sampled | None:
    """Share of received attention that goes to the most-read tenth of the keys, by layer; None without later layers."""
    found = later(lab, "concentration")
    return lab.jackknife.mean(found) if found.shape[1] else None


@claim(
    1, "sinks.tokens", "Some tokens attract attention",
    "Certain tokens attract attention from other tokens disproportionately.",
    "share of the attention between different tokens that goes to the tenth of the keys that receives most, mean over "
    "the layers after the first; claimed to be more than half, so that they get more than all other keys together. "
    "Even attention would give them a third, since more queries see early keys, and they are chosen after the fact",
)  # fmt: skip
def some_tokens(lab: Lab) -> Finding:
    found = concentrated(lab)
    if found is None:
        return Finding.not_applicable(ONE_LAYER)
    mean = lab.jackknife.mean(np.nanmean(later(lab, "concentration"), axis=1))
    details: dict[str, Detail] = {"layers": found.estimate, "if all keys were read alike": even(lab.spec.length)}
    return Finding.of(mean.estimate, "share", no_effect=MOST, details=details)


@claim(
    1, "sinks.every-layer", "Every layer has such tokens",
    "The pattern is consistent: such tokens are there in every layer after the first.",
    "the same share in the layer whose interval reaches lowest; claimed to be more than half, for the same reason",
)  # fmt: skip
def in_every_layer(lab: Lab) -> Finding:
    found = concentrated(lab)
    if found is None:
        return Finding.not_applicable(ONE_LAYER)
    by_layer = found.estimate
    least = int(np.argmin(np.where(np.isfinite(by_layer.low), by_layer.low, by_layer.value)))
    number = lab.run().summary.layer_ids[1 + least]
    return Finding.of(by_layer[least], "share", no_effect=MOST, details={"layer": number})


@claim(
    1, "sinks.position-0", "Position 0 is a sink",
    "A positional anchor, the first token, attracts attention disproportionately.",
    "mean attention of the reference queries to position 0, over the heads of the layers after the first in which they "
    "see it; claimed to be more than each key would get if all were read alike, 1 / (r + 1) from reference r",
)  # fmt: skip
def position_0(lab: Lab) -> Finding:
    at_0 = later(lab, "profile")[..., 0]
    if not at_0.shape[1]:
        return Finding.not_applicable(ONE_LAYER)
    sees = np.nanmax(at_0, axis=(0, 2)) > 0  # behind a window nothing is read of it
    if not sees.any():
        return Finding.not_applicable("windows hide position 0 from late queries in every layer")
    at_0 = at_0[:, sees]
    alike = float(np.mean([1 / (r + 1) for r in lab.plan.references]))
    details: dict[str, Detail] = {"sink rate of Gu et al., first 64 queries": sink_rate(lab)}
    mean = lab.jackknife.mean(np.nanmean(at_0, axis=(1, 2)))
    return Finding.of(mean.estimate, "share of attention", no_effect=alike, details=details)


def sink_rate(lab: Lab) -> float:
    """Share of heads whose mean attention to position 0, over the first 64 queries, is above 0.3; mean over prompts."""
    heads = lab.metric("sink_start")
    return float((heads[np.isfinite(heads)] > SINK_THRESHOLD).mean())


untestable(
    2, "sinks.no-artifact", "Sinks are no artifact of architecture",
    "Attention sinks are not an architectural artifact.",
    "one model has one architecture: whether that makes the sinks takes several architectures that were trained alike",
)  # fmt: skip


def typed(lab: Lab) -> Float64[np.ndarray, "B layers types"]:
    """Shares of the three types, by prompt and layer; 0 for all of them where a layer has no anchor."""
    found: Array = np.nan_to_num(np.stack([lab.metric(name) for name in TYPES], axis=-1))
    return found


@claim(
    2, "sinks.frames", "Layers have reference frames",
    "Attention establishes reference frames.",
    "share of the layers after the first in which some key is an anchor, read by far queries more than 5 times as much "
    "as the median key, and over 0.02; claimed to be more than half, so that layers with a frame outnumber the others",
)  # fmt: skip
def frames_exist(lab: Lab) -> Finding:
    anchors = later(lab, "anchors")
    if not anchors.shape[1]:
        return Finding.not_applicable(ONE_LAYER)
    mean = lab.jackknife.mean((anchors > 0).mean(axis=1))
    details: dict[str, Detail] = {"anchors per layer": lab.jackknife.mean(anchors.mean(axis=1)).estimate}
    return Finding.of(mean.estimate, "share of layers", no_effect=0.5, details=details)


@claim(
    3, "sinks.type", "The frame has one of three types",
    "A reference frame is of one of three distinct types: centralized, distributed or bidirectional.",
    "attention to anchors is split into the three types, whose shares add up to 1; the largest share minus the second "
    "largest, in the mean over layers that have an anchor in some prompt; 0 is an undecided type. Details name it",
)  # fmt: skip
def frame_type(lab: Lab) -> Finding:
    shares = typed(lab)
    framed = shares.sum(-1).any(axis=0)
    if not framed.any():
        return Finding.not_applicable(NO_ANCHOR)
    means = lab.jackknife.mean(shares[:, framed].mean(axis=1))
    second, first = np.argsort(means.value)[-2:]
    details: dict[str, Detail] = {"type": TYPES[first], "by layer": by_layer(lab, shares.mean(axis=0))}
    details |= {name: means[k].estimate for k, name in enumerate(TYPES)}
    return Finding.of((means[first] - means[second]).estimate, "share", details=details)


def by_layer(lab: Lab, shares: Float64[np.ndarray, "layers types"]) -> str:
    """`0 none, 1 centralized, …`"""
    names = [TYPES[int(each.argmax())] if each.any() else "none" for each in shares]
    return ", ".join(f"{number} {name}" for number, name in zip(lab.run().summary.layer_ids, names, strict=True))


@claim(
    3, "sinks.correlate", "Frames go with sinks",
    "Reference frames correlate with the attention sink.",
    "correlation over layers of star-likeness, the largest share of queries that give one key more than "
    f"{EDGE_THRESHOLD:g} of their attention (what the authors ask of a reference token), with the mean attention of late "
    "queries to position 0; 0 is no relation. Both are read off one pattern: it says that the sink is the centre",
)  # fmt: skip
def frames_and_sinks(lab: Lab) -> Finding:
    jackknife, at_0 = lab.jackknife, np.nanmean(lab.metric("profile")[..., 0], axis=2)
    if at_0.shape[1] < 3:
        return Finding.not_applicable("a correlation over layers needs three of them")
    star, shares = at_threshold(lab.metrics["star"]), typed(lab)
    details: dict[str, Detail] = {name: correlated(jackknife, shares[..., k], at_0) for k, name in enumerate(TYPES)}
    return Finding.of(correlated(jackknife, star, at_0), "correlation", details=details)


def at_threshold(found: xr.DataArray) -> Float64[np.ndarray, "B layers"]:
    """The graph with the edges that are stronger than EDGE_THRESHOLD."""
    chosen: Array = found.sel(threshold=EDGE_THRESHOLD, method="nearest").values
    return chosen


untestable(
    4, "sinks.early-training", "Frames emerge early in training",
    "Reference frames emerge during the earliest stages of training.",
    "one checkpoint has no training dynamics: it takes checkpoints of one training, the first ones above all",
)  # fmt: skip

untestable(
    4, "sinks.optimal", "Frames are optimal solutions",
    "Reference frames are optimal solutions to the problem of stable coordinates in many dimensions.",
    "that a solution is optimal cannot be seen from one solution: it takes the objective and the others, and the "
    "abstract names neither",
)  # fmt: skip

untestable(
    5, "sinks.components", "Position encoding sets the type",
    "Components of the architecture, position encoding above all, influence the type of the frame.",
    "the model was trained with one position encoding: it takes models that differ in it. `sinks.type` of each can be "
    "compared",
)  # fmt: skip
