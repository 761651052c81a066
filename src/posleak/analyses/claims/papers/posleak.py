"""Claims of posleak itself, about the circuit of position (analyses/circuit). They belong to no paper.

Sentences, tests and bounds were fixed when numbers of a prototype on SmolLM2-135M and stories15M were known, and before
any other model was tried.
"""

from __future__ import annotations

from functools import partial

from posleak.analyses.circuit.erasure import Erased
from posleak.analyses.circuit.writing import CONTROLLED, RemovedBySize
from posleak.analyses.claims import catalogue
from posleak.analyses.claims.catalogue import Finding
from posleak.analyses.claims.lab import Lab
from posleak.edits.direction import ERASE
from posleak.papers import OWN_CLAIMS

MOST_HEADS = 0.05
"""Largest share of the heads that counts as few."""

HALF = 0.5

KNOWN = "sentence, test and bound, when numbers of a prototype on SmolLM2-135M and stories15M were known"
NOTHING = "what earlier layers pass on is not significantly above 0"

claim = partial(catalogue.claim, paper=OWN_CLAIMS, decided=KNOWN)


def few_heads(lab: Lab) -> RemovedBySize | None:
    """Return the effect of the largest controlled set of at most MOST_HEADS of the heads; None without writers."""
    writing = lab.circuit.writing
    sizes = [k for k in CONTROLLED if k <= max(1, MOST_HEADS * writing.heads) and k <= len(writing.writers)]
    return writing.of_size(sizes[-1]) if sizes else None


@claim(
    1, "circuit.few-heads", "Few heads write position",
    "Few heads write the position that earlier layers pass on.",
    "share that goes away if only the first k heads see equally many keys at every position; k is the largest of 1, 3 "
    f"and 8 that is at most {MOST_HEADS:.0%} of the heads; heads are ranked on other prompts; claimed to be above half",
)  # fmt: skip
def few_heads_write(lab: Lab) -> Finding:
    if (row := few_heads(lab)) is None:
        return Finding.not_applicable(NOTHING)
    effect = lab.in_norm(row.norms)
    return Finding.of(
        effect.removed, "share", no_effect=HALF, details={"heads": row.k, "of": lab.circuit.writing.heads}
    )


@claim(
    1, "circuit.not-any", "Random heads write less",
    "Random heads of the same layers write less position than these heads.",
    "the same share minus the mean share of 8 random sets of as many heads of the same layers; the interval covers "
    "prompts and draws",
)  # fmt: skip
def random_heads_write_less(lab: Lab) -> Finding:
    row = few_heads(lab)
    effect = None if row is None else lab.in_norm(row.norms)
    if effect is None or effect.difference is None or effect.random is None:
        return Finding.not_applicable(NOTHING)
    return Finding.of(effect.difference, "share", details={"random heads": effect.random})


@claim(
    2, "circuit.one-direction", "One direction carries position",
    "One direction of the residual stream carries most of the positional variance.",
    "share of the positional variance along the leading direction at the middle depth, a direction that is fitted on "
    "other prompts; claimed to be above half",
)  # fmt: skip
def one_direction(lab: Lab) -> Finding:
    if lab.circuit.leading is None:
        return Finding.not_applicable("the layers exchange several streams")
    depth, leading = lab.circuit.leading
    if leading.value != leading.value:
        return Finding.not_applicable("the positional variance is not significantly above 0")
    return Finding.of(leading, "share", no_effect=HALF, details={"depth": depth})


@claim(
    2, "circuit.erasure", "Erasing it removes position",
    "Erasing this direction removes most of the position that earlier layers pass on.",
    "share that goes away if the leading direction is erased at every depth and every position after the origin; "
    "claimed to be above half. Details: erasing a random direction, and the change of the loss in nats per token",
)  # fmt: skip
def erasing_removes(lab: Lab) -> Finding:
    row = lab.circuit.erased(ERASE, 1)
    if row is None:
        return Finding.not_applicable("the layers exchange several streams")
    removed = lab.in_norm(row.norms)
    if removed.value != removed.value:
        return Finding.not_applicable(NOTHING)
    return Finding.of(removed, "share", no_effect=HALF, details=_controls(row))


def _controls(row: Erased) -> dict[str, catalogue.Detail]:
    details = {"a random direction": row.random, "change of the loss": row.loss_change}
    return {name: value for name, value in details.items() if value is not None}
