"""Bigram-Backcopy (Guo et al. 2024, "Active-dormant attention heads"): a Markov chain with copy triggers.

    after an ordinary token   the next token is drawn from the successors of that token
    after a trigger           the next token repeats the token before the trigger

A copying head is active after triggers and dormant after all other tokens. A dormant head must attend to tokens from
which it takes nothing, such as position 0 or triggers. The chain is stationary, and the same for every vocabulary:

    the first 3 ordinary ids are triggers, the next 61 are the other tokens
    an ordinary token is followed by a trigger with probability 1/4, so that a fifth of all tokens are triggers; else by
    one of 4 successors, with probabilities 8, 4, 2 and 1 of 16, or, 1 of 16, by any token that is not a trigger
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from posleak.errors import InputError

from .bodies import draw
from .vocabulary import Vocabulary

CHAIN_TOKENS, CHAIN_TRIGGERS, SUCCESSORS = 64, 3, 4
"""Number of tokens of the chain, number of triggers among them, and number of successors of each other token."""

CHAIN_SEED = 2412
"""Random seed for the successors, which define the task. It does not depend on the seed for the prompts."""

BURN_IN = 16
"""Steps before the first token of a prompt, which make the chain stationary."""

SUCCESSOR_WEIGHTS = (8, 4, 2, 1, 1)
"""Probabilities in sixteenths: of the successors, and of any token that is not a trigger."""


@cache
def successors() -> np.ndarray:
    """Return int64 [CHAIN_TOKENS, SUCCESSORS]: the successors of each token. The rows of triggers are not used."""
    others = CHAIN_TOKENS - CHAIN_TRIGGERS
    rows = [draw(CHAIN_SEED, token, SUCCESSORS, below=others) + CHAIN_TRIGGERS for token in range(CHAIN_TOKENS)]
    return np.stack(rows)


def walk(seed: int, indices: list[int], length: int) -> np.ndarray:
    """Return int64 [B, length]: tokens 0 … CHAIN_TOKENS − 1. Row b depends only on (seed, indices[b])."""
    steps, others, table = BURN_IN + length, CHAIN_TOKENS - CHAIN_TRIGGERS, successors()
    # Three random integers per step: trigger or not, which successor, which token if any token may follow.
    drawn = np.stack([draw(seed, index, 3 * steps, below=4 * CHAIN_TRIGGERS * 16 * others) for index in indices])
    trigger, choice, any_token = (drawn[:, part::3] for part in range(3))
    choice = np.searchsorted(np.cumsum(SUCCESSOR_WEIGHTS), choice % 16, side="right")
    tokens = np.empty((len(indices), steps), dtype=np.int64)
    tokens[:, 0] = before = CHAIN_TRIGGERS + any_token[:, 0] % others
    for step in range(1, steps):
        last = tokens[:, step - 1]
        rank, free = choice[:, step], CHAIN_TRIGGERS + any_token[:, step] % others
        ordinary = np.where(rank < SUCCESSORS, table[last, np.minimum(rank, SUCCESSORS - 1)], free)
        drawn_next = np.where(trigger[:, step] % 4 == 0, trigger[:, step] // 4 % CHAIN_TRIGGERS, ordinary)
        tokens[:, step] = np.where(last < CHAIN_TRIGGERS, before, drawn_next)
        before = last
    return tokens[:, BURN_IN:]


@dataclass(frozen=True, eq=False)
class BackcopyBody:
    """Tokens of the chain as ids of a model. allowed: int64 [CHAIN_TOKENS], the ids of the chain's tokens."""

    allowed: np.ndarray

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        return np.asarray(self.rows(seed, [index], length)[0])

    def rows(self, seed: int, indices: list[int], length: int) -> np.ndarray:
        """Return int64 [B, length]: several prompts at once, which is faster."""
        return np.asarray(self.allowed[walk(seed, indices, length)])

    def describe(self) -> dict[str, Any]:
        return {"chain_tokens": CHAIN_TOKENS, "chain_triggers": CHAIN_TRIGGERS}


@dataclass(frozen=True)
class Backcopy:
    """Bigram-Backcopy as a source of prompts: `--inputs backcopy`."""

    text = "backcopy"

    def body(self, length: int, seed: int, vocabulary: Vocabulary) -> BackcopyBody:
        allowed = vocabulary.allowed
        if len(allowed) < CHAIN_TOKENS:
            raise InputError(
                "the vocabulary is too small for --inputs backcopy", where="inputs",
                got=f"{len(allowed)} ordinary tokens", expected=f"at least {CHAIN_TOKENS}",
                remedy="use --inputs random",
            )  # fmt: skip
        return BackcopyBody(allowed[:CHAIN_TOKENS])
