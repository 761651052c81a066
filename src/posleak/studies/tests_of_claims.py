"""How each claim is tested: by measurement, by an edit that would change it if it were true, or by a law."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from posleak.edits import parse_edits
from posleak.leakage import Estimate
from posleak.leakage.power import unbiased
from posleak.origin import closure
from posleak.probe import attach, relative_difference

from . import laws
from .balance import depth_slope, slope
from .claims import claim
from .lab import Lab
from .verdicts import Finding, Side

FIRST_LAYER = 0.05
"""Residual power in the first layer, as a share of the mask's, below which the mask is all there is."""

CLOSED = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
RING = {torch.float64: 1e-12, torch.float32: 1e-4, torch.float16: 1e-1, torch.bfloat16: 1.0}
ROLL = 11


LATER = slice(1, None)
"""The layers after the first."""


@claim(
    1, "relative-logits", "RoPE logits are relative: moving all positions changes nothing beyond rounding.",
    f"rms change of log-attention when all position ids move by {laws.SHIFT}, per prompt, against the dtype's rounding",
)  # fmt: skip
def relative_logits(lab: Lab) -> Finding:
    if not lab.subject.identity.rotary:
        return Finding.not_applicable("the model has no rotary position encoding")
    ids = lab.ids[:8]
    floors = np.array([laws.shift_floor(lab.subject.model, lab.plan, row[None], laws.SHIFT) for row in ids])
    bound = laws.AGREE.get(lab.subject.model.dtype, laws.AGREE[torch.bfloat16])
    return Finding.of(lab.mean(floors), "nats rms", no_effect=bound, side=Side.BELOW)


@claim(
    2, "leakage", "Leakage exists: attention at equal offsets differs between early and late queries.",
    "power of log a_i(δ) − log a_r(δ), mean over heads, layers, queries and offsets",
)  # fmt: skip
def leakage_exists(lab: Lab) -> Finding:
    return Finding.of(lab.bootstrap.inner_product(lab.own("total")), "nats²")


@claim(
    3, "mask.every-layer", "The mask leaks by construction: in every layer.",
    "mask power of the layer where it is least sure to be above 0",
)  # fmt: skip
def mask_in_every_layer(lab: Lab) -> Finding:
    powers = lab.bootstrap.inner_product(np.nanmean(lab.grams().own["mask"], axis=1))
    least = int(np.argmin(powers.low))
    return Finding.of(powers[least], "nats²", details={"layer": least, "layers": powers})


@claim(
    3, "mask.first-layer", "In the first layer the mask is all there is.",
    f"residual power of the first layer as a share of its mask power; all there is means less than {FIRST_LAYER:.0%}",
)  # fmt: skip
def first_layer_is_mask(lab: Lab) -> Finding:
    first = slice(0, 1)
    share = lab.bootstrap.ratio(lab.own("residual", layers=first), lab.own("mask", layers=first))
    return Finding.of(share, "share", no_effect=FIRST_LAYER, side=Side.BELOW)


@claim(
    3, "mask.ring", "Without the mask, on a ring of positions, there is no absolute position at all.",
    f"largest relative change of any state when the input is rolled by {ROLL}: mask off, frequencies snapped to the "
    "ring, no BOS; in float64 where it fits into memory. The same with the mask is in the details",
)  # fmt: skip
def ring(lab: Lab) -> Finding:
    model, wide = lab.subject.model, lab.fits_float64()
    dtype = torch.float64 if wide else model.dtype
    texts = ["dtype=float64"] if wide else []
    ids = torch.from_numpy(parse_edits(["bos=none"])[0].prompts(lab.tokens).batch(range(3))).to(lab.subject.device)
    gaps, masked = rolled_gaps(model, ids, [*texts, "ring"]), rolled_gaps(model, ids[:1], texts)
    bound = RING.get(dtype, RING[torch.bfloat16])
    details = {"with the mask": max(masked), "dtype": str(dtype).removeprefix("torch.")}
    return Finding.of(lab.mean(np.array(gaps)), "relative", no_effect=bound, side=Side.BELOW, details=details)


def rolled_gaps(model: Any, ids: torch.Tensor, texts: list[str]) -> list[float]:
    """Largest relative difference, over all depths, between the states of a rolled prompt and its rolled states."""
    with attach(model, edits=parse_edits(texts)) as probe:
        still, rolled = (probe.forward(x, output_hidden_states=True).hidden_states for x in (ids, ids.roll(ROLL, 1)))
    depths = [(a.roll(ROLL, 1), b) for a, b in zip(still, rolled, strict=True)]
    return [max(relative_difference(b[row], a[row]) for a, b in depths) for row in range(len(ids))]


@claim(
    4, "residual", "The residual stream leaks: beyond the first layer.",
    "residual power (drift + sink), mean over the heads of all layers but the first",
)  # fmt: skip
def residual_leaks(lab: Lab) -> Finding:
    return Finding.of(lab.bootstrap.inner_product(lab.own("residual", layers=LATER)), "nats²")


@claim(
    5, "isolation.total", "Controlled isolation: with the denominator fixed in every layer, leakage goes down.",
    "denominator=fixed: 1 − total power after / before, paired",
)  # fmt: skip
def isolation_total(lab: Lab) -> Finding:
    found = lab.removed("total", "denominator=fixed")
    early = lab.removed("total", "denominator=fixed", early=True)
    return Finding.of(found, "share removed", details={"early": early, **sink_attention(lab, "denominator=fixed")})


@claim(
    5, "isolation.downstream", "The residual component of later layers is downstream of the mask's denominator.",
    "denominator=fixed: 1 − drift power after / before in the layers after the first, paired",
)  # fmt: skip
def isolation_downstream(lab: Lab) -> Finding:
    found = lab.removed("drift", "denominator=fixed", layers=LATER)
    early = lab.removed("drift", "denominator=fixed", layers=LATER, early=True)
    return Finding.of(found, "share removed", details={"early": early, **sink_attention(lab, "denominator=fixed")})


@claim(
    5, "isolation.first-layer", "Fixing the denominator of the first layer alone lowers the drift of later layers.",
    "denominator=fixed@0, which leaves the sinks of later layers alive: 1 − drift power after / before in the layers "
    "after the first, paired",
)  # fmt: skip
def isolation_first_layer(lab: Lab) -> Finding:
    edit = "denominator=fixed@0"
    found = lab.removed("drift", edit, layers=LATER)
    early = lab.removed("drift", edit, layers=LATER, early=True)
    return Finding.of(found, "share removed", details={"early": early, **sink_attention(lab, edit)})


def sink_attention(lab: Lab, text: str) -> dict[str, float]:
    """Mean attention of reference queries to position 0: an edit that kills the sink does more than it was meant to."""
    before, after = (float(lab.data(*edits)["sink_attention"].mean()) for edits in ((), (text,)))
    return {"attention to position 0 before": before, "attention to position 0 after": after}


@claim(
    6, "closure", "Position 0 is a closed system: its states do not depend on what follows.",
    "largest relative difference of the state at position 0 in context and alone, over all depths, per prompt",
)  # fmt: skip
def closed_system(lab: Lab) -> Finding:
    model = lab.subject.model
    ids = torch.from_numpy(lab.ids[:8])
    gaps = np.array(closure(model, ids).per_prompt)
    bound = CLOSED.get(model.dtype, CLOSED[torch.bfloat16])
    opened = closure(model, ids[:1], edits=parse_edits(["mask=off"])).worst
    return Finding.of(
        lab.mean(gaps), "relative", no_effect=bound, side=Side.BELOW, details={"with the mask off": opened}
    )


@claim(
    7, "sink-heads.count", "Sink-reading heads read position 0.",
    "share of heads whose mean attention to position 0 over the reference queries is above 0.3",
)  # fmt: skip
def sink_heads(lab: Lab) -> Finding:
    reading = lab.origin.reading
    total, heads = reading.total, sum(reading.heads)
    share = Estimate(total.value / heads, total.low / heads, total.high / heads, total.n)
    return Finding.of(share, "share of heads", details={"heads": heads, "by call": reading.counts})


@claim(
    7, "sink-heads.writes", "What they write comes from position 0.",
    "norm of a_i0 · W_O v_0 as a share of the norm of the head's output, mean over sink-reading heads; "
    "claimed to be more than an equal part of the sequence would give",
)  # fmt: skip
def sink_writes(lab: Lab) -> Finding:
    reading = lab.origin.reading
    if not reading.readers.any():
        return Finding.not_applicable("no head reads position 0 with more than 0.3 of its attention")
    written, chosen = reading.written, reading.readers
    value, low, high = (np.asarray(np.nanmean(x[chosen])) for x in (written.value, written.low, written.high))
    share = Estimate(value, low, high, written.n)
    return Finding.of(share, "share of norm", no_effect=1 / lab.length, details={"space": reading.space})


def replacement(text: str, lab: Lab) -> Finding:
    """Removed share of the residual power at early queries, and what happens to the rest."""
    if lab.tokens.first.id is None:
        return Finding.not_applicable("no BOS stands at position 0")
    details = {
        "residual, all queries": lab.removed("residual", text),
        "mask, early": lab.removed("mask", text, early=True),
        "total, early": lab.removed("total", text, early=True),
        **sink_attention(lab, text),
    }
    return Finding.of(lab.removed("residual", text, early=True), "share removed", details=details)


REPLACEMENTS = {
    "zero": ("bos=zero", "nothing"),
    "mean": ("bos=mean", "the mean embedding"),
    "noise": ("bos=noise", "noise of the same norm"),
    "noise-2": ("bos=noise:1", "another draw of noise"),
    "token": ("bos=token", "another token's embedding"),
    "none": ("bos=none", "whatever the text has there"),
    "random": ("bos=random", "a random token for each prompt"),
}


def _token(lab: Lab) -> Finding:
    """The other token is the one in the middle of the ordinary vocabulary: any will do, but always the same."""
    allowed = lab.tokens.vocabulary.allowed
    return replacement(f"bos=token:{int(allowed[len(allowed) // 2])}", lab)


for _name, (_text, _what) in REPLACEMENTS.items():
    claim(
        8, f"bos.{_name}", f"Replacing the BOS by {_what} removes residual leakage at early queries.",
        f"{_text}: 1 − residual power after / before at queries before 32, mean over layers and heads, paired "
        "(the paper reports 40% on Llama-3.2-3B under its own protocol)",
    )(_token if _name == "token" else partial(replacement, _text))  # fmt: skip


@claim(
    9, "stabiliser.factor", "Sinks are stabilisers: they damp the mask's leakage.",
    "mask power if position 0 were an ordinary key, divided by mask power; 1 is no effect",
)  # fmt: skip
def stabilisation(lab: Lab) -> Finding:
    factor = lab.bootstrap.ratio(lab.own("mask_without_sink"), lab.own("mask"))
    return Finding.of(factor, "times", no_effect=1.0)


@claim(
    9, "stabiliser.cut", "Cutting the sink raises the mask's leakage.",
    "sink=cut: mask power after / before, paired; 1 is no effect",
)  # fmt: skip
def cutting(lab: Lab) -> Finding:
    ratio = lab.bootstrap.ratio(lab.own("mask", "sink=cut"), lab.own("mask"))
    residual = lab.bootstrap.ratio(lab.own("residual", "sink=cut"), lab.own("residual"))
    return Finding.of(ratio, "times", no_effect=1.0, details={"residual": residual})


SAME = 1e-5
"""1 − cosine below which two fingerprints are the same one, rounded."""


@claim(
    10, "fingerprint.fixed", "The fingerprint is deterministic: the same first token, the same direction.",
    "largest 1 − cosine of W_O v_0 between prompts with the same first token, per sink-reading head",
)  # fmt: skip
def fingerprint_fixed(lab: Lab) -> Finding:
    same = lab.origin.fingerprint.same
    if not len(same):
        return Finding.not_applicable("no sink-reading head")
    if lab.tokens.first.id is None:
        return Finding.not_applicable("no BOS: first tokens differ between prompts")
    return Finding.of(lab.mean(same), "1 − cosine", no_effect=SAME, side=Side.BELOW)


@claim(
    10, "fingerprint.varies", "It varies with the first token otherwise.",
    "1 − mean cosine of W_O v_0 between different first tokens, mean over sink-reading heads, bootstrap over tokens",
)  # fmt: skip
def fingerprint_varies(lab: Lab) -> Finding:
    found = lab.origin.fingerprint
    if not len(found.heads):
        return Finding.not_applicable("no sink-reading head")
    return Finding.of(_away(found.overall), "1 − cosine", no_effect=SAME, details={"carried": found.carried})


@claim(
    10, "fingerprint.no-bos", "With no BOS it varies with the text.",
    "1 − mean cosine of W_O v_0 between the first tokens of text crops (the standard library's documentation)",
)  # fmt: skip
def fingerprint_of_text(lab: Lab) -> Finding:
    if lab.subject.tokenizer is None:
        return Finding.not_applicable("natural text needs a tokenizer, and the model came without one")
    found = lab.text_fingerprint()
    if found is None:
        return Finding.not_applicable("no sink-reading head")
    return Finding.of(_away(found), "1 − cosine", no_effect=SAME)


def _away(cosine: Estimate) -> Estimate:
    return Estimate(1 - cosine.value, 1 - cosine.high, 1 - cosine.low, cosine.n)


@claim(
    11, "depth", "The residual component grows with depth.",
    "least-squares slope of a layer's residual power against relative depth, divided by its mean over layers",
)  # fmt: skip
def depth_trend(lab: Lab) -> Finding:
    powers = np.nanmean(lab.grams().own["residual"], axis=1)  # [L, B, B]
    _, relative = depth_slope(powers, np.arange(len(powers)), lab.bootstrap)
    return Finding.of(relative, "per relative depth", details={"layers": lab.bootstrap.inner_product(powers)})


NTK = "rope=ntk:4"


@claim(
    12, "ntk", "NTK scaling suppresses the residual component.",
    f"{NTK} on the same weights: 1 − residual power after / before, mean over layers and heads, paired",
)  # fmt: skip
def ntk_suppresses(lab: Lab) -> Finding:
    return Finding.of(lab.removed("residual", NTK), "share removed", details=sink_attention(lab, NTK))


def window_of(lab: Lab) -> str:
    """A quarter of the prompt: three quarters of the queries lie behind it."""
    return f"window={lab.length // 4}"


def accumulation(lab: Lab, text: str) -> Finding:
    """Slope of the residual with depth under an edit minus the slope without it, over the mean residual power."""
    before, after = (np.nanmean(lab.grams(*edits).own["residual"], axis=1) for edits in ((), (text,)))
    depth, bootstrap = np.linspace(0, 1, len(before)), lab.bootstrap
    scale = unbiased(before).mean()
    value = (slope(unbiased(after), depth) - slope(unbiased(before), depth)) / scale
    samples = (slope(bootstrap.inner(after), depth) - slope(bootstrap.inner(before), depth)) / scale
    low, high = bootstrap.interval(samples)
    found = Estimate(np.asarray(value), low, high, bootstrap.prompts)
    details = {"edit": text, "removed": lab.removed("residual", text), **sink_attention(lab, text)}
    return Finding.of(found, "per relative depth", details=details)


@claim(
    13, "window", "A sliding window lets the residual component accumulate with depth.",
    "a window of a quarter of the prompt on the same weights: slope of the residual power with depth after − before, "
    "divided by the mean residual power before, paired",
)  # fmt: skip
def window_accumulates(lab: Lab) -> Finding:
    return accumulation(lab, window_of(lab))


@claim(
    13, "window.with-sink", "So does a window that keeps position 0 in sight.",
    "the same window with the first token kept",
)  # fmt: skip
def window_with_sink_accumulates(lab: Lab) -> Finding:
    return accumulation(lab, window_of(lab) + "+sink")


@claim(
    14, "between", "Standard RoPE sits between the two.",
    f"the smaller of residual(standard) − residual({NTK}) and residual(window) − residual(standard), divided by "
    "residual(standard), same weights, paired",
)  # fmt: skip
def standard_between(lab: Lab) -> Finding:
    grams = [lab.own("residual", *edits) for edits in ((NTK,), (), (window_of(lab),))]

    def smaller(ntk: Any, standard: Any, window: Any) -> Any:
        return np.minimum(standard - ntk, window - standard) / standard

    value, samples = smaller(*map(unbiased, grams)), smaller(*map(lab.bootstrap.inner, grams))
    low, high = lab.bootstrap.interval(samples)
    return Finding.of(Estimate(np.asarray(value), low, high, lab.prompts), "share")
