"""Entropies of the Bigram-Backcopy chain: the lowest possible loss of a model trained on it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from posleak.inputs.backcopy import CHAIN_TOKENS, CHAIN_TRIGGERS, SUCCESSOR_WEIGHTS, successors


@dataclass(frozen=True)
class Entropies:
    """Entropies of the chain in nats per token.

    unigram       entropy of a token without context
    conditional   conditional entropy of a token, given all tokens before it
    ordinary      entropy of a token that is not a trigger
    """

    unigram: float
    conditional: float
    ordinary: float

    def lowest_loss(self, length: int, *, bos: bool) -> float:
        """Return the lowest possible expected loss on prompts of `length` tokens.

        After a BOS the first token has no context. A trigger at the first position copies a token outside the prompt.
        """
        first = [self.unigram] if bos else []
        unseen = self.conditional + self.ordinary / 5
        return (sum(first) + unseen + (length - 2 - len(first)) * self.conditional) / (length - 1)


@cache
def entropies() -> Entropies:
    """Compute the entropies from the stationary distribution of ordinary tokens, whose transitions skip triggers."""
    others = CHAIN_TOKENS - CHAIN_TRIGGERS
    steps = np.full((others, others), SUCCESSOR_WEIGHTS[-1] / 16 / others)
    for token, row in enumerate(successors()[CHAIN_TRIGGERS:] - CHAIN_TRIGGERS):
        np.add.at(steps[token], row, np.array(SUCCESSOR_WEIGHTS[:-1]) / 16)
    shares = np.linalg.matrix_power(steps, 256)[0]
    triggers = np.full(CHAIN_TRIGGERS, 1 / CHAIN_TRIGGERS)
    after = np.array([_entropy(np.concatenate([triggers / 4, 0.75 * row])) for row in steps])
    return Entropies(
        _entropy(np.concatenate([triggers / 5, 0.8 * shares])), float(0.8 * shares @ after), _entropy(shares)
    )


def _entropy(shares: np.ndarray) -> float:
    """Return the entropy of a distribution in nats."""
    return float(-(shares * np.log(shares)).sum())
