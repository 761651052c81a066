"""The circuit of one model in sentences, with intervals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from posleak.edits.direction import ERASE, LEACE
from posleak.leakage import Estimate
from posleak.show.numbers import estimate

from .erasure import Erased
from .writing import RemovedBySize

if TYPE_CHECKING:
    from .circuit import Circuit

FROM_EARLIER = "leakage from earlier layers"
"""P(no head) − P(all heads): the leakage that disappears if all heads attend to lent keys."""

ERASURE_NAMES = {ERASE: "Erasing the leading direction", LEACE: "Erasing one direction by LEACE"}


def sentences_of(circuit: Circuit) -> Iterator[str]:
    """Yield the result in sentences, with intervals."""
    writing, chosen = circuit.writing, circuit.writing.chosen
    if chosen is None:
        yield f"The {FROM_EARLIER} is not significantly above 0, so no head is reported as a writer."
        return
    yield _sentence_of_set(chosen, f"{chosen.k} of {writing.heads} heads", f" of the {FROM_EARLIER}")
    even, removed = chosen.even.removed, chosen.leading.removed
    if even.low > removed.high or even.high < removed.low:
        yield f"Evenly weighted, the share is {estimate(even, 'share')} (n = {even.n})."
    if not writing.reached:
        yield f"The largest measured set, the first {chosen.k} heads of the ranking, accounts for less than 90%."
    shorter = [row for row in writing.removed if row.k < chosen.k and row.leading.random is not None]
    if shorter:
        count = f"{shorter[-1].k} of them" if shorter[-1].k > 1 else "of them"
        yield _sentence_of_set(shorter[-1], f"The first {count}", "")
    if (others := chosen.leading.others) is not None:
        yield f"All other heads account for {estimate(others, 'share')} (n = {others.n}): {_alone(others)}."
    if circuit.leading is not None:
        yield _sentence_of_direction(*circuit.leading)
    for row in circuit.erasure:
        if row.method in ERASURE_NAMES and row.k == 1:
            yield _sentence_of_erasure(row)


def _sentence_of_set(row: RemovedBySize, heads: str, of: str) -> str:
    effect, verb = row.leading, "account" if row.k > 1 else "accounts"
    count = f"{row.k} random heads of the same layers" if row.k > 1 else "a random head of the same layer"
    random = f", {count} for {estimate(effect.random, 'share')}" if effect.random else ""
    return f"{heads} {verb} for {estimate(effect.removed, 'share')}{of}{random} (n = {effect.removed.n})."


def _alone(others: Estimate) -> str:
    """Say whether the writers keep the leakage if all other heads attend to lent keys: 1 − others of it remains."""
    if others.low > 0.5:
        return "the writers alone do not write most of it"
    return "the writers alone write most of it" if others.high < 0.5 else "whether the writers suffice is not decided"


def _sentence_of_direction(depth: int, leading: Estimate) -> str:
    if np.isnan(leading.value):
        return f"At depth {depth}, the positional variance is not significantly above 0 (n = {leading.n})."
    share = f"{estimate(leading, 'share')} of the positional variance (n = {leading.n})"
    return f"At depth {depth}, one direction of the residual stream carries {share}."


def _sentence_of_erasure(row: Erased) -> str:
    removed = f"{estimate(row.earlier_removed, 'share')} of the {FROM_EARLIER}"
    random = f", a random direction {estimate(row.random, 'share')}" if row.random is not None else ""
    where = (
        f"only at depths {row.depths}, where the positional share is significant," if row.depths else "at every depth"
    )
    by_random = f", a random direction by {estimate(row.random_loss)}" if row.random_loss is not None else ""
    return (
        f"{ERASURE_NAMES[row.method]} {where} removes {removed}{random} (n = {row.earlier_removed.n}). It changes "
        f"the next-token loss ({row.loss_inputs}) by {estimate(row.loss_change)}{by_random} nats per token (n = "
        f"{row.loss_change.n})."
    )
