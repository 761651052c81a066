"""Bigram-Backcopy (Guo et al. 2024, "Active-dormant attention heads"): a Markov chain whose triggers call for a copy.

    after an ordinary token   the next token is drawn from that token's own successors
    after a trigger           the next token is the one before the trigger

A head that copies has something to do after a trigger and nothing to do after any other token. Its attention must be
somewhere meanwhile, on tokens that it takes nothing from: position 0 is one, and triggers are others. The chain is
stationary, and the same for every vocabulary of the same size:

    the first 3 ordinary ids are triggers, the next 61 its other tokens
    after an ordinary token comes a trigger with probability 1/4, so that triggers are a fifth of all tokens; else one
    of 4 successors, with probabilities 8, 4, 2 and 1 of 16, or, 1 of 16, any token that is no trigger
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from posleak.errors import InputError
from posleak.inputs.randomness import draw
from posleak.inputs.vocabulary import Vocabulary

CHAIN_TOKENS, CHAIN_TRIGGERS, SUCCESSORS = 64, 3, 4
"""How many tokens the chain has, how many of them are triggers, and how many follow on each other token."""

CHAIN_SEED = 2412
"""The seed of the successors: they are the task, and no user's choice."""

BURN_IN = 16
"""Steps that the chain makes before a prompt begins: then no position is special."""

_WEIGHTS = (8, 4, 2, 1, 1)
"""Of the successors, and of any token that is no trigger; in sixteenths."""


def successors() -> np.ndarray:
    """int64 [CHAIN_TOKENS, SUCCESSORS]: what may follow each token; rows of triggers are unused after their copy."""
    others = CHAIN_TOKENS - CHAIN_TRIGGERS
    return np.stack(
        [draw(CHAIN_SEED, token, SUCCESSORS, below=others) + CHAIN_TRIGGERS for token in range(CHAIN_TOKENS)]
    )


def walk(seed: int, indices: list[int], length: int, table: np.ndarray) -> np.ndarray:
    """int64 [B, length]: tokens of the chain, 0 … CHAIN_TOKENS − 1; row b depends on (seed, indices[b]) alone."""
    steps, others = BURN_IN + length, CHAIN_TOKENS - CHAIN_TRIGGERS
    # Three numbers a step: is it a trigger, which sort of successor, which token if any will do.
    drawn = np.stack([draw(seed, index, 3 * steps, below=4 * CHAIN_TRIGGERS * 16 * others) for index in indices])
    chance, sort, anyone = (drawn[:, part::3] for part in range(3))
    sort = np.searchsorted(np.cumsum(_WEIGHTS), sort % 16, side="right")
    found = np.empty((len(indices), steps), dtype=np.int64)
    found[:, 0] = before = CHAIN_TRIGGERS + anyone[:, 0] % others
    for step in range(1, steps):
        last = found[:, step - 1]
        free = CHAIN_TRIGGERS + anyone[:, step] % others
        follows = np.where(sort[:, step] < SUCCESSORS, table[last, np.minimum(sort[:, step], SUCCESSORS - 1)], free)
        drawn_next = np.where(chance[:, step] % 4 == 0, chance[:, step] // 4 % CHAIN_TRIGGERS, follows)
        found[:, step] = np.where(last < CHAIN_TRIGGERS, before, drawn_next)
        before = last
    return found[:, BURN_IN:]


@dataclass(frozen=True)
class Entropies:
    """Of the chain, in nats per token.

    unigram    of a token by itself;  given: of a token, given all before it
    ordinary   of a token that is no trigger
    """

    unigram: float
    given: float
    ordinary: float

    def least(self, length: int, *, bos: bool) -> float:
        """The least loss that can be expected on prompts of so many tokens. After BOS, the first token has nothing
        before it; and a trigger that stands first copies a token that nobody saw."""
        first = [self.unigram] if bos else []
        unseen = self.given + self.ordinary / 5
        return (sum(first) + unseen + (length - 2 - len(first)) * self.given) / (length - 1)


@cache
def entropies() -> Entropies:
    """Ordinary tokens follow on each other by the successors alone: a trigger and its copy come in between."""
    others = CHAIN_TOKENS - CHAIN_TRIGGERS
    steps = np.full((others, others), _WEIGHTS[-1] / 16 / others)
    for token, row in enumerate(successors()[CHAIN_TRIGGERS:] - CHAIN_TRIGGERS):
        np.add.at(steps[token], row, np.array(_WEIGHTS[:-1]) / 16)
    shares = np.linalg.matrix_power(steps, 256)[0]
    triggers = np.full(CHAIN_TRIGGERS, 1 / CHAIN_TRIGGERS)
    after = np.array([_entropy(np.concatenate([triggers / 4, 0.75 * row])) for row in steps])
    return Entropies(
        _entropy(np.concatenate([triggers / 5, 0.8 * shares])), float(0.8 * shares @ after), _entropy(shares)
    )


def _entropy(shares: np.ndarray) -> float:
    return float(-(shares * np.log(shares)).sum())


@dataclass(frozen=True, eq=False)
class BackcopyBody:
    """Prompts of the chain, in a model's own ids."""

    allowed: np.ndarray
    """int64 [CHAIN_TOKENS]: the ids of the chain's tokens."""
    _table: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_table", successors())

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        return np.asarray(self.rows(seed, [index], length)[0])

    def rows(self, seed: int, indices: list[int], length: int) -> np.ndarray:
        """int64 [B, length]: several prompts at once, which is quicker."""
        return np.asarray(self.allowed[walk(seed, indices, length, self._table)])

    def describe(self) -> dict[str, Any]:
        return {"chain_tokens": CHAIN_TOKENS, "chain_triggers": CHAIN_TRIGGERS}


@dataclass(frozen=True)
class Backcopy:
    """The task as a source of prompts: `--inputs backcopy`."""

    @property
    def text(self) -> str:
        return "backcopy"

    def body(self, length: int, seed: int, vocabulary: Vocabulary) -> BackcopyBody:
        allowed = vocabulary.allowed
        if len(allowed) < CHAIN_TOKENS:
            raise InputError(
                "the vocabulary is too small for Bigram-Backcopy", where="inputs",
                got=f"{len(allowed)} ordinary tokens", expected=f"{CHAIN_TOKENS} or more", remedy="use --inputs random",
            )  # fmt: skip
        return BackcopyBody(allowed[:CHAIN_TOKENS])
