"""The claims of arXiv 2508.02546: attention sinks are the anchors of reference frames.

Frames are computed from the attention of each layer, averaged over its heads; docs/metrics.md defines the measures. The
last sentence of the abstract is a judgement about the usefulness of this view and has no entry.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from jaxtyping import Float64

from posleak.analyses.claims import catalogue
from posleak.analyses.claims.catalogue import Detail, Finding
from posleak.analyses.claims.lab import LATER, Lab
from posleak.arrays import Array
from posleak.errors import UnsupportedError
from posleak.leakage.contrast import correlated
from posleak.metrics.table import EDGE_THRESHOLD, SINK_THRESHOLD
from posleak.papers import SINKS

claim = partial(catalogue.claim, paper=SINKS, metrics=True)
untestable = partial(catalogue.untestable, paper=SINKS)

TYPES = ("centralized", "distributed", "bidirectional")

MOST = 0.5
"""Share of attention above which a tenth of the keys receives more than all others together."""


HALF = "the bound of half, after tiny random models had been seen, and before any trained one"
TOKENS = "frames are of tokens, not of groups of keys, since a review after the first verdicts"
FRAMES = f"{TOKENS}; the limits of an anchor are those of a sink's width, chosen when a trial on SmolLM2-135M was known"
"""Choices that were made after data had been seen (`Claim.decided`)."""


def uniform_concentration(tokens: int) -> float:
    """Return the share of the tenth of the keys that receives most attention, under uniform causal attention.

    It is the first tenth, which is visible to most queries: key j receives Σ_{i>j} 1 / (i + 1) from other tokens.
    """
    received = np.cumsum(1 / np.arange(tokens, 0, -1))[::-1] - 1 / np.arange(1, tokens + 1)
    most = tokens - math.ceil(0.9 * (tokens - 1))
    return float(received[:most].sum() / received.sum())


def later(lab: Lab, name: str) -> Float64[np.ndarray, "B later *rest"]:
    """Return a metric of the layers after the first, by prompt; raise UnsupportedError if there are none."""
    values = lab.metric(name)[:, LATER]
    if not values.shape[1]:
        raise UnsupportedError("the model has one attention layer")
    return values


@claim(
    1, "sinks.tokens", "Some tokens attract attention",
    "Certain tokens attract attention from other tokens disproportionately.",
    "share of the attention between different tokens that goes to the tenth of the keys with most attention, mean over "
    "the layers after the first; claimed to be more than half, that is, more than all other keys together. Uniform "
    "attention would give a third, because early keys are visible to more queries and the keys are selected post hoc",
    decided=f"{HALF}; {TOKENS}",
)  # fmt: skip
def some_tokens(lab: Lab) -> Finding:
    shares = later(lab, "concentration")
    details = {"layers": lab.mean(shares), "if all keys were read alike": uniform_concentration(lab.spec.length)}
    return Finding.of(lab.mean(np.nanmean(shares, axis=1)), "share", no_effect=MOST, details=details)


@claim(
    1, "sinks.every-layer", "Every layer has such tokens",
    "The pattern is consistent: every layer after the first has such tokens.",
    "the same share in the layer with the smallest lower end of its interval; claimed to be more than half",
    decided=f"{HALF}; {TOKENS}",
)  # fmt: skip
def in_every_layer(lab: Lab) -> Finding:
    by_layer = lab.mean(later(lab, "concentration"))
    least = int(np.argmin(np.where(np.isfinite(by_layer.low), by_layer.low, by_layer.value)))
    number = lab.run().summary.layer_ids[1 + least]
    return Finding.of(by_layer[least], "share", no_effect=MOST, details={"layer": number})


@claim(
    1, "sinks.position-0", "Position 0 is a sink",
    "A positional anchor, the first token, attracts attention disproportionately.",
    "mean attention of the reference queries to position 0, over the heads of the layers after the first in which it "
    "is visible; claimed to be more than under uniform attention, 1 / (r + 1) from reference r",
    decided="layers in which windows hide position 0 are left out since a review after the first verdicts",
)  # fmt: skip
def position_0(lab: Lab) -> Finding:
    at_0 = later(lab, "profile")[..., 0]
    sees = np.nanmax(at_0, axis=(0, 2)) > 0  # a window may hide it
    if not sees.any():
        return Finding.not_applicable("windows hide position 0 from late queries in every layer")
    at_0 = at_0[:, sees]
    alike = float(np.mean([1 / (r + 1) for r in lab.spec.plan.references]))
    heads = lab.metric("sink_start")
    rate = float((heads[np.isfinite(heads)] > SINK_THRESHOLD).mean())
    mean, details = lab.mean(np.nanmean(at_0, axis=(1, 2))), {"sink rate of Gu et al., first 64 queries": rate}
    return Finding.of(mean, "share of attention", no_effect=alike, details=details)


untestable(
    2, "sinks.no-artifact", "Sinks are not an architectural artifact",
    "Attention sinks are not an architectural artifact.",
    "one model has one architecture: a test needs several architectures with the same training",
)  # fmt: skip


def type_shares(lab: Lab) -> Float64[np.ndarray, "B layers types"]:
    """Return the shares of the three types, by prompt and layer; all are 0 in a layer without an anchor."""
    shares: Array = np.nan_to_num(np.stack([lab.metric(name) for name in TYPES], axis=-1))
    return shares


@claim(
    2, "sinks.frames", "Layers have reference frames",
    "Attention establishes reference frames.",
    "share of the layers after the first in which some key is an anchor: it receives from distant queries more than 5 "
    "times the attention of the median key, and more than 0.02; claimed to be more than half of the layers",
    decided=FRAMES,
)  # fmt: skip
def frames_exist(lab: Lab) -> Finding:
    anchors = later(lab, "anchors")
    details = {"anchors per layer": lab.mean(anchors.mean(axis=1))}
    return Finding.of(lab.mean((anchors > 0).mean(axis=1)), "share of layers", no_effect=0.5, details=details)


@claim(
    3, "sinks.type", "The frame has one of three types",
    "A reference frame is of one of three distinct types: centralized, distributed or bidirectional.",
    "attention to anchors is divided among the three types, with shares that sum to 1; largest minus second largest "
    "share, mean over layers with an anchor in some prompt; 0 is an undecided type. Details: the type",
    decided=FRAMES,
)  # fmt: skip
def frame_type(lab: Lab) -> Finding:
    shares = type_shares(lab)
    framed = shares.sum(-1).any(axis=0)
    if not framed.any():
        return Finding.not_applicable("no layer has an anchor, a key that receives clearly more attention than others")
    means = lab.jackknife.mean(shares[:, framed].mean(axis=1))
    second, first = np.argsort(means.value)[-2:]
    names = [TYPES[int(share.argmax())] if share.any() else "none" for share in shares.mean(axis=0)]
    by_layer = ", ".join(f"{at} {name}" for at, name in zip(lab.run().summary.layer_ids, names, strict=True))
    details: dict[str, Detail] = {"type": TYPES[first], "by layer": by_layer}
    details |= {name: means[k].estimate for k, name in enumerate(TYPES)}
    return Finding.of((means[first] - means[second]).estimate, "share", details=details)


@claim(
    3, "sinks.correlate", "Frames correlate with sinks",
    "Reference frames correlate with the attention sink.",
    "correlation over layers of star-likeness, the largest share of queries that give one key more than "
    f"{EDGE_THRESHOLD:g} of their attention (the authors' criterion for a reference token), with the mean attention of "
    "late queries to position 0; 0 is no relation. Both are computed from the same attention: a correlation means that "
    "the sink is the centre",
    decided=TOKENS,
)  # fmt: skip
def frames_and_sinks(lab: Lab) -> Finding:
    jackknife, at_0 = lab.jackknife, np.nanmean(lab.metric("profile")[..., 0], axis=2)
    if at_0.shape[1] < 3:
        return Finding.not_applicable("a correlation over layers needs at least three layers")
    star = lab.metrics["star"].sel(threshold=EDGE_THRESHOLD, method="nearest").values  # of edges stronger than it
    shares = type_shares(lab)
    details = {name: correlated(jackknife, shares[..., k], at_0) for k, name in enumerate(TYPES)}
    return Finding.of(correlated(jackknife, star, at_0), "correlation", details=details)


untestable(
    4, "sinks.early-training", "Frames emerge early in training",
    "Reference frames emerge during the earliest stages of training.",
    "one checkpoint has no training dynamics: a test needs checkpoints of one training run, above all early ones",
)  # fmt: skip

untestable(
    4, "sinks.optimal", "Frames are optimal solutions",
    "Reference frames are optimal solutions to the problem of stable coordinates in many dimensions.",
    "optimality cannot be decided from one solution: a test needs the objective and the alternatives, and the abstract "
    "names neither",
)  # fmt: skip

untestable(
    5, "sinks.components", "Position encoding sets the type",
    "Components of the architecture, position encoding above all, influence the type of the frame.",
    "the model was trained with one position encoding: a test needs models that differ in it, whose `sinks.type` can "
    "be compared",
)  # fmt: skip
