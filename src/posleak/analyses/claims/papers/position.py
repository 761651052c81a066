"""The claims of arXiv 2606.06160. A test is a measurement, its change under an edit, or a law.

The protocol of the paper is not public: definitions (docs/definitions.md) and tests are our own.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from posleak.analyses.claims import catalogue
from posleak.analyses.claims.catalogue import Finding, Kept, Side
from posleak.analyses.claims.lab import LATER, LAW_TOKENS, Lab
from posleak.analyses.doctor import laws
from posleak.analyses.doctor.passes import RECURRENT, SHIFT, first_entrance
from posleak.analyses.origin.reading import reader_counts
from posleak.analyses.origin.states import closure, states
from posleak.arrays import Array
from posleak.axes import LEFT
from posleak.edits import parse_edits
from posleak.leakage import combined
from posleak.leakage.contrast import depth_slope, slope
from posleak.models import exclusive
from posleak.papers import POSITION
from posleak.probe import attach, default_plan, relative_difference
from posleak.rounding import AGREE, CLOSED, RING, computed_in
from posleak.show.numbers import REMOVED

claim = partial(catalogue.claim, paper=POSITION)

FIRST_LAYER = 0.05
"""Share of the mask power below which the residual power of the first layer counts as zero."""

ROLL = 11
"""Number of positions by which prompts are rolled."""

NORM = "the norm: weighted by attention since version 3, after evenly weighted results of version 2 had been seen"
LAWS = "the first tokens of 16 prompts are read since a law had been inconclusive with 4 whole prompts"
ISOLATED = f"sentence and test, when a trial on SmolLM2-135M was known; {NORM}"
SAME_WEIGHTS = f"sentence and test, when measurements of SmolLM2-135M were known; {NORM}"
"""Choices that were made after data had been seen (`Claim.decided`)."""


@claim(
    1, "relative-logits", "Logits are relative",
    "RoPE logits are relative: shifting all positions has no effect beyond rounding.",
    f"rms change of log-attention when all position ids are shifted by {SHIFT}, per prompt (its first {LAW_TOKENS} "
    "tokens); claimed to be below the rounding bound of the dtype",
    decided=LAWS,
)  # fmt: skip
def relative_logits(lab: Lab) -> Finding:
    rotary, context = lab.subject.identity.rotary, lab.subject.context
    if not lab.rotary:
        return Finding.not_applicable("the model has no rotary position encoding")
    model, ids = lab.subject.model, lab.few
    if not rotary and context is not None and context < ids.shape[1] + SHIFT:
        return Finding.not_applicable(f"the model has only {context} positions")
    plan = default_plan(ids.shape[1])
    with exclusive(model):
        still, moved = (laws.log_attention(model, plan, ids, start) for start in (0, SHIFT))
        floors = np.array([laws.rms_change([x[b] for x in still], [x[b] for x in moved]) for b in range(len(ids))])
        rounding = AGREE.of(computed_in(model.dtype))
    return Finding.of(lab.mean(floors), "nats rms", no_effect=rounding, side=Side.BELOW)


@claim(
    2, "leakage", "Leakage exists",
    "Leakage exists: attention at the same offset differs between early and late queries.",
    "power of log a_i(δ) − log a_r(δ), mean over heads, layers, queries and offsets",
    decided=NORM,
)  # fmt: skip
def leakage_exists(lab: Lab) -> Finding:
    return Finding.of(lab.power("total").estimate, "nats²")


@claim(
    3, "mask.every-layer", "The mask leaks in every layer",
    "The mask leaks by construction, in every layer.",
    "mask power of the layer with the smallest lower end of its interval",
    decided=NORM,
)  # fmt: skip
def mask_in_every_layer(lab: Lab) -> Finding:
    powers = lab.layers("mask").estimate
    least = int(np.argmin(powers.low))
    return Finding.of(powers[least], "nats²", details={"layer": lab.run().summary.layer_ids[least], "layers": powers})


@claim(
    3, "mask.first-layer", "The first layer leaks by the mask only",
    "In the first layer, all leakage is caused by the mask.",
    f"residual power of the first layer as a share of its mask power; claimed to be less than {FIRST_LAYER:.0%}",
    decided=f"the bound of {FIRST_LAYER:.0%}, when measurements of SmolLM2-135M were known; {NORM}",
)  # fmt: skip
def first_layer_is_mask(lab: Lab) -> Finding:
    residual, mask = (lab.power(name, layers=slice(0, 1)) for name in ("residual", "mask"))
    return Finding.of(residual.over(mask).estimate, "share", no_effect=FIRST_LAYER, side=Side.BELOW)


@claim(
    3, "mask.ring", "No mask, no position",
    "Without the mask, on a ring of positions, there is no absolute position at all.",
    f"largest relative change of any state when the input is rolled by {ROLL} positions: mask off, frequencies rounded "
    f"to the ring, no BOS, the first {LAW_TOKENS} tokens of each prompt, in float64. Details: the same with the mask",
    decided=LAWS,
)  # fmt: skip
def ring(lab: Lab) -> Finding:
    model, wide, count = lab.subject.model, "dtype=float64", lab.enough
    lab.require_float64(count)
    plain = parse_edits(["bos=none"])[0].prompts(lab.tokens).batch(range(count))[:, :LAW_TOKENS]
    ids = torch.from_numpy(plain).to(lab.subject.device)
    if other := lab.run().record.calibration.unmeasured:
        return Finding.not_applicable(f"not only the measured attention mixes positions: there is {other[0]}")
    entrance = first_entrance(model, int(ids[0, -1]))
    if entrance is not None and entrance.kind == RECURRENT:
        return Finding.not_applicable(f"not only attention mixes positions: {entrance.reason}")
    gaps, masked = rolled_gaps(model, ids, [wide, "ring"]), rolled_gaps(model, ids[:1], [wide])
    details, bound = {"with the mask": max(masked), "dtype": "float64"}, RING.of(torch.float64)
    return Finding.of(lab.mean(np.array(gaps)), "relative", no_effect=bound, side=Side.BELOW, details=details)


def rolled_gaps(model: PreTrainedModel, ids: Tensor, texts: list[str]) -> list[float]:
    """Return the largest relative difference between states of the rolled prompt and rolled states, by prompt."""
    with attach(model, edits=parse_edits(texts)) as probe:
        still, rolled = (states(probe, x) for x in (ids, ids.roll(ROLL, 1)))
    depths = [(a.roll(ROLL, 1), b) for a, b in zip(still, rolled, strict=True)]
    return [max(relative_difference(b[row], a[row]) for a, b in depths) for row in range(len(ids))]


@claim(
    4, "residual", "The residual stream leaks",
    "The residual stream leaks beyond the first layer.",
    "residual power (drift + sink), mean over the heads of all layers but the first",
    decided=NORM,
)  # fmt: skip
def residual_leaks(lab: Lab) -> Finding:
    return Finding.of(lab.power("residual", layers=LATER).estimate, "nats²")


@claim(
    5, "isolation.total", "Equal numbers of keys, no leakage",
    "Controlled isolation: leakage disappears if every query sees the same number of keys.",
    "branch B of the trace, in which each query also attends to keys of another document, so that all queries see "
    "equally many: 1 − total power of its rows with these keys / ordinary total power, paired",
    decided=ISOLATED,
)  # fmt: skip
def isolation_total(lab: Lab) -> Finding:
    def remaining(early: bool) -> Kept:
        ratio = lab.power(LEFT, lab.branches, early=early).over(lab.power("total", early=early))
        return Kept("total", ratio.estimate, "early" if early else "all")

    kept = [remaining(early) for early in (False, True)]
    return Finding.of(1 - kept[0].ratio, REMOVED, edited=lab.edited(lab.branches, "keys of another document", *kept))


@claim(
    5, "isolation.downstream", "Earlier masks cause the residual",
    "The residual component of later layers is caused by the masks of earlier layers.",
    "branch B of the trace, rows without the keys of the other document: 1 − residual power after / before in the "
    "layers after the first, paired",
    decided=ISOLATED,
)  # fmt: skip
def isolation_downstream(lab: Lab) -> Finding:
    kept, early = (lab.kept("residual", lab.branches, early=queries, later=True) for queries in (False, True))
    edited = lab.edited(lab.branches, "keys of another document, rows without them", kept, early)
    return Finding.of(1 - kept.ratio, REMOVED, edited=edited)


@claim(
    5, "isolation.origin", "Position 0 is a separate source",
    "Position 0 is a separate source: it leaks position even where every query sees equally many keys.",
    "share of `origin` in the total leakage: how much of it disappears if, in addition, every query sees position 0 at "
    "the same distance (branches B and C of the trace). Details: the other shares, what is `left`, and `order`, the "
    "difference between the two orders of removing masks",
    decided=f"origin is an intervention on position 0 since version 3, after the remainder of version 2 had been "
    f"seen: −2% (−11% … 5%) on SmolLM2-135M, 16 prompts; {ISOLATED}",
)  # fmt: skip
def isolation_origin(lab: Lab) -> Finding:
    sources = lab.sources
    shares = {name: share for name, share in sources.share.items() if name != "origin"}
    return Finding.of(sources.share["origin"], "share", details={**shares, **sources.ratios})


@claim(
    6, "closure", "Position 0 is closed",
    "Position 0 is a closed system: its states do not depend on later tokens.",
    f"largest relative difference between the state at position 0 in context and alone, over all depths, per prompt "
    f"(its first {LAW_TOKENS} tokens)",
    decided=LAWS,
)  # fmt: skip
def closed_system(lab: Lab) -> Finding:
    model, ids = lab.subject.model, torch.from_numpy(lab.few)
    with exclusive(model):
        closed, bound = closure(model, ids), CLOSED.of(model.dtype)
        opened = closure(model, ids[:1], edits=parse_edits(["mask=off"])).worst
    return Finding.of(
        lab.mean(np.array(closed.per_prompt)), "relative", no_effect=bound, side=Side.BELOW,
        details={"with the mask off": opened},
    )  # fmt: skip


@claim(
    7, "sink-heads.count", "Heads read position 0",
    "Sink-reading heads read position 0.",
    "share of heads whose mean attention to position 0 over the reference queries is above 0.3",
    decided="the 16 prompts of the baseline instead of 8 others, after results of version 1 had been seen",
)  # fmt: skip
def sink_heads(lab: Lab) -> Finding:
    at_0 = lab.run().data["profile"].values[..., 0]
    heads = int(np.isfinite(at_0[0]).sum())
    counts, total = reader_counts(at_0, lab.jackknife)
    return Finding.of(total / heads, "share of heads", details={"heads": heads, "by call": counts})


@claim(
    7, "sink-heads.writes", "Sink heads write the value of position 0",
    "The output of sink-reading heads comes from position 0.",
    "norm of a_i0 · W_O v_0 divided by the norm of the head's output, mean over sink-reading heads; claimed to be more "
    "than the share of one of N equal positions, 1 / N",
    decided="the interval is a jackknife over prompts of the mean over heads since version 3, after the verdict by the "
    "mean of the ends of the heads' intervals had been seen",
)  # fmt: skip
def sink_writes(lab: Lab) -> Finding:
    reading = lab.origin.reading
    if not reading.heads:
        return Finding.not_applicable("no head reads position 0 with more than 0.3 of its attention")
    share, details = reading.mean["written"], {"space": reading.space}
    return Finding.of(share, "share of norm", no_effect=1 / lab.spec.length, details=details)


def replacement(lab: Lab, edit: str, about: str) -> Finding:
    """Return the removed share of the residual power at early queries, with other components in `edited`.

    The other token is the middle one of the ordinary vocabulary.
    """
    if lab.tokens.first.id is None:
        return Finding.not_applicable("there is no BOS at position 0")
    if edit == "bos=token":
        allowed = lab.tokens.vocabulary.allowed
        edit = f"{edit}:{int(allowed[len(allowed) // 2])}"
    parts = (("residual", True), ("residual", False), ("mask", True), ("total", True))
    kept = [lab.kept(name, edit, early=early) for name, early in parts]
    return Finding.of(1 - kept[0].ratio, REMOVED, edited=lab.edited(edit, about, *kept))


REPLACEMENTS = {
    "zero": ("bos=zero", "a zero vector", "BOS → zero"),
    "mean": ("bos=mean", "the mean embedding", "BOS → mean embedding"),
    "noise": ("bos=noise", "noise of the same norm, different in each prompt,", "BOS → noise, same norm"),
    "token": ("bos=token", "another token's embedding", "BOS → another token"),
    "none": ("bos=none", "the token of the text at this position", "no BOS"),
    "random": ("bos=random", "a random token for each prompt", "BOS → a random token per prompt"),
}


NOISE = "the noise differs between prompts since version 3, after 8 directions had each been measured on all prompts"


def _replacing(edit: str, about: str) -> catalogue.Test:
    return lambda lab: replacement(lab, edit, about)


for _name, (_edit, _what, _about) in REPLACEMENTS.items():
    claim(
        8, f"bos.{_name}", _about, f"Replacing the BOS by {_what} removes residual leakage at early queries.",
        f"{_edit}: 1 − residual power after / before at queries before 32, mean over layers and heads, paired "
        "(the paper reports 40% on Llama-3.2-3B under its own protocol)",
        decided=f"{NOISE}; {NORM}" if _name == "noise" else NORM,
    )(_replacing(_edit, _about))  # fmt: skip


@claim(
    9, "stabiliser.factor", "Sinks damp the mask",
    "Sinks are stabilisers: they damp the leakage of the mask.",
    "mask power if the keys of the origin were ordinary keys, divided by mask power; 1 is no effect",
    decided=NORM,
)  # fmt: skip
def stabilisation(lab: Lab) -> Finding:
    return Finding.of(lab.power("mask_without_sink").over(lab.power("mask")).estimate, "times", no_effect=1.0)


@claim(
    9, "stabiliser.cut", "Cutting the sink raises mask leakage",
    "Cutting the sink raises the leakage of the mask.",
    "sink=cut: mask power after / before, paired; 1 is no effect",
    decided=NORM,
)  # fmt: skip
def cutting(lab: Lab) -> Finding:
    mask, residual = lab.kept("mask", "sink=cut"), lab.kept("residual", "sink=cut")
    return Finding.of(mask.ratio, "times", no_effect=1.0, edited=lab.edited("sink=cut", "sink cut", mask, residual))


SAME = 1e-5
"""1 − cosine below which two fingerprints are equal up to rounding."""


@claim(
    10, "fingerprint.fixed", "Same first token, same fingerprint",
    "The fingerprint is deterministic: it is the same for the same first token.",
    "largest 1 − cosine of W_O v_0 between prompts with the same first token, per sink-reading head",
)  # fmt: skip
def fingerprint_fixed(lab: Lab) -> Finding:
    heads = lab.origin.fingerprint.heads
    if not heads:
        return Finding.not_applicable("no sink-reading head")
    if lab.tokens.first.id is None:
        return Finding.not_applicable("no BOS: prompts have different first tokens")
    return Finding.of(lab.mean(np.array([head.same for head in heads])), "1 − cosine", no_effect=SAME, side=Side.BELOW)


@claim(
    10, "fingerprint.varies", "Different token, different fingerprint",
    "The fingerprint varies with the first token.",
    "1 − mean cosine of W_O v_0 between different first tokens, mean over sink-reading heads; interval over tokens",
)  # fmt: skip
def fingerprint_varies(lab: Lab) -> Finding:
    fingerprint = lab.origin.fingerprint
    if not fingerprint.heads:
        return Finding.not_applicable("no sink-reading head")
    details = {"carried": fingerprint.carried}
    return Finding.of(1 - fingerprint.different, "1 − cosine", no_effect=SAME, details=details)


@claim(
    10, "fingerprint.no-bos", "Without a BOS the text determines it",
    "Without a BOS the fingerprint varies with the text.",
    "1 − mean cosine of W_O v_0 between the first tokens of text crops (the standard library's documentation)",
)  # fmt: skip
def fingerprint_of_text(lab: Lab) -> Finding:
    if lab.subject.tokenizer is None:
        return Finding.not_applicable("natural text needs a tokenizer, and the model has none")
    cosine = lab.text_fingerprint()
    if cosine is None:
        return Finding.not_applicable("no sink-reading head")
    return Finding.of(1 - cosine, "1 − cosine", no_effect=SAME)


@claim(
    11, "depth", "The residual grows with depth",
    "The residual component grows with depth.",
    "least-squares slope of the residual power of layers against relative depth, divided by the mean over layers",
    decided=NORM,
)  # fmt: skip
def depth_trend(lab: Lab) -> Finding:
    powers = lab.layers("residual")
    _, relative = depth_slope(powers)
    return Finding.of(relative.estimate, "per relative depth", details={"layers": powers.estimate})


NTK = "rope=ntk:4"


@claim(
    12, "ntk", "NTK scaling suppresses the residual",
    "NTK scaling suppresses the residual component.",
    f"{NTK} on the same weights: 1 − residual power after / before, mean over layers and heads, paired",
    decided=SAME_WEIGHTS,
)  # fmt: skip
def ntk_suppresses(lab: Lab) -> Finding:
    kept = lab.kept("residual", NTK)
    return Finding.of(1 - kept.ratio, REMOVED, edited=lab.edited(NTK, "NTK scaling, 4 times", kept))


def window_of(lab: Lab) -> str:
    """Return the edit for a window of a quarter of the prompt, which hides keys from three quarters of the queries."""
    return f"window={lab.spec.length // 4}"


def accumulation(lab: Lab, edit: str, about: str) -> Finding:
    """Return the change of the residual's slope with depth under an edit, divided by the mean residual power."""
    before, after = lab.layers("residual"), lab.layers("residual", edit)
    depth, scale = np.linspace(0, 1, len(before.value)), float(before.value.mean())
    steeper = combined(lambda y: slope(y, depth), after) - combined(lambda y: slope(y, depth), before)
    edited = lab.edited(edit, about, lab.kept("residual", edit))
    return Finding.of((steeper / scale).estimate, "per relative depth", edited=edited)


@claim(
    13, "window", "A window lets the residual accumulate",
    "A sliding window lets the residual component accumulate with depth.",
    "a window of a quarter of the prompt on the same weights: slope of the residual power against relative depth, "
    "after − before, divided by the mean residual power before, paired",
    decided=SAME_WEIGHTS,
)  # fmt: skip
def window_accumulates(lab: Lab) -> Finding:
    return accumulation(lab, window_of(lab), "window of a quarter")


@claim(
    13, "window.with-sink", "Also with position 0 always visible",
    "A sliding window that keeps position 0 visible also lets the residual component accumulate with depth.",
    "a window of a quarter of the prompt with position 0 visible: slope after − before, as for the plain window",
    decided=SAME_WEIGHTS,
)  # fmt: skip
def window_with_sink_accumulates(lab: Lab) -> Finding:
    return accumulation(lab, window_of(lab) + "+sink", "the same window, position 0 kept")


@claim(
    14, "between", "Standard RoPE lies between",
    "Standard RoPE lies between NTK scaling and a sliding window.",
    f"the smaller of residual(standard) − residual({NTK}) and residual(window) − residual(standard), divided by "
    "residual(standard), same weights, paired",
    decided=SAME_WEIGHTS,
)  # fmt: skip
def standard_between(lab: Lab) -> Finding:
    def smaller(ntk: Array, standard: Array, window: Array) -> Array:
        return np.asarray(np.minimum(standard - ntk, window - standard) / standard)

    powers = [lab.power("residual", *edits) for edits in ((NTK,), (), (window_of(lab),))]
    return Finding.of(combined(smaller, *powers).estimate, "share")


catalogue.untestable(
    15, "balance", "Each architecture has its balance",
    "Both components appear in every architecture, in a balance specific to the architecture.",
    "one model has one balance: `posleak sweep architectures` compares several models. Claims 3 and 4 test whether "
    "both components appear in this model",
    paper=POSITION,
)  # fmt: skip
