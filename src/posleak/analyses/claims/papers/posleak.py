"""Claims of posleak itself, about the circuit of position (analyses/circuit). They belong to no paper.

Sentences, tests and bounds were fixed after results of a prototype on SmolLM2-135M and stories15M had been seen, and
before any other model was measured.
"""

from __future__ import annotations

from functools import partial

from posleak.analyses.circuit.erasure import Erased
from posleak.analyses.circuit.writing import RemovedBySize
from posleak.analyses.claims import catalogue
from posleak.analyses.claims.catalogue import Finding
from posleak.analyses.claims.lab import Lab
from posleak.edits.direction import ERASE
from posleak.papers import OWN_CLAIMS

FEW, MOST_HEADS = (1, 3, 8), 0.05
"""Numbers of heads that count as few, as long as they are at most this share of all heads."""

MAJORITY = 0.5

AFTER_PROTOTYPE = "sentence, test and bound, after results of a prototype on SmolLM2-135M and stories15M had been seen"
NO_LEAKAGE = "the leakage from earlier layers is not significantly above 0"
SEVERAL_STREAMS = "the directions that carry position were not measured: see the warnings of the circuit"

claim = partial(catalogue.claim, paper=OWN_CLAIMS, decided=AFTER_PROTOTYPE)


def few_heads(lab: Lab) -> RemovedBySize | None:
    """Return the effect of the largest set of few heads; None without writers."""
    writing = lab.circuit.writing
    k = max(k for k in FEW if k <= max(1, MOST_HEADS * writing.heads))
    return writing.of_size(k) if writing.writers else None


@claim(
    1, "circuit.few-heads", "Few heads write position",
    "A few heads cause most of the leakage from earlier layers.",
    "share of the leakage from earlier layers that is removed if only the first k heads of the ranking also attend to "
    "keys of another document, so that they see equally many keys at every position; k is the largest of 1, 3 and 8 "
    f"that is at most {MOST_HEADS:.0%} of the heads, at least 1; heads are ranked on other prompts; claimed to be "
    "above half",
)  # fmt: skip
def few_heads_write(lab: Lab) -> Finding:
    if (row := few_heads(lab)) is None:
        return Finding.not_applicable(NO_LEAKAGE)
    effect = lab.in_norm(row.norms)
    return Finding.of(
        effect.removed, "share", no_effect=MAJORITY, details={"heads": row.k, "of": lab.circuit.writing.heads}
    )


@claim(
    1, "circuit.random-heads", "Random heads write less",
    "Random heads of the same layers cause less of this leakage than the first heads of the ranking.",
    "share removed by the first k heads, as in circuit.few-heads, minus the mean share of 8 random sets of k other "
    "heads of the same layers; the interval combines the variation over prompts and over random sets",
)  # fmt: skip
def random_heads_write_less(lab: Lab) -> Finding:
    if (row := few_heads(lab)) is None:
        return Finding.not_applicable(NO_LEAKAGE)
    effect = lab.in_norm(row.norms)
    if effect.difference is None or effect.random is None:
        return Finding.not_applicable(f"some layer has too few heads besides the first {row.k} for a random set")
    return Finding.of(effect.difference, "share", details={"random heads": effect.random})


@claim(
    2, "circuit.one-direction", "One direction carries position",
    "One direction of the residual stream carries most of the positional variance.",
    "share of the positional variance along the leading direction at the middle depth, a direction that is fitted on "
    "other prompts; claimed to be above half",
)  # fmt: skip
def one_direction(lab: Lab) -> Finding:
    if lab.circuit.leading is None:
        return Finding.not_applicable(SEVERAL_STREAMS)
    depth, leading = lab.circuit.leading
    if leading.value != leading.value:
        return Finding.not_applicable("the positional variance is not significantly above 0")
    return Finding.of(leading, "share", no_effect=MAJORITY, details={"depth": depth})


@claim(
    2, "circuit.erasure", "Erasing the direction removes position",
    "Erasing the leading direction of each depth removes most of the leakage from earlier layers.",
    "share of that leakage that is removed if the leading direction is erased at every depth and every position after "
    "the origin; claimed to be above half. Details: erasing a random direction, and the change of the loss in nats per "
    "token",
)  # fmt: skip
def erasing_removes(lab: Lab) -> Finding:
    row = lab.circuit.erased(ERASE, 1)
    if row is None:
        return Finding.not_applicable(SEVERAL_STREAMS)
    removed = lab.in_norm(row.norms)
    if removed.value != removed.value:
        return Finding.not_applicable(NO_LEAKAGE)
    return Finding.of(removed, "share", no_effect=MAJORITY, details=_controls(row))


def _controls(row: Erased) -> dict[str, catalogue.Detail]:
    details = {"a random direction": row.random, "change of the loss": row.loss_change}
    return {name: value for name, value in details.items() if value is not None}
