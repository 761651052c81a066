"""Token ids of prompts before the BOS policy sets position 0.

A body always draws all T positions, and a BOS then replaces position 0. Two runs with different BOS policies therefore
have the same tokens at all other positions, and differ only in the BOS.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from posleak.errors import InputError
from posleak.inputs.randomness import draw
from posleak.inputs.vocabulary import Vocabulary

FIRST_DONOR = 2**31
"""Donors are numbered like prompts, from this index on."""


class Body(Protocol):
    """A generator of token ids: the ids of prompt `index` are a function of (seed, index) alone."""

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        """Return the ids of one prompt, int64 [length]."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return facts about the origin of the tokens that results must record."""
        ...


@dataclass(frozen=True, eq=False)
class RandomBody:
    """I.i.d. tokens, uniform over the allowed ids."""

    allowed: np.ndarray

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        return np.asarray(self.allowed[draw(seed, index, length, below=len(self.allowed))])

    def describe(self) -> dict[str, Any]:
        return {}


def random_body(vocabulary: Vocabulary) -> RandomBody:
    """Return random tokens, or raise InputError if the vocabulary has fewer than 2 ordinary tokens."""
    allowed = vocabulary.allowed
    if len(allowed) < 2:
        raise InputError(
            "the vocabulary is too small for random prompts", where="inputs",
            got=f"{len(allowed)} ordinary token of {vocabulary.size}", expected="at least 2 ordinary tokens",
            remedy="use --inputs constant, or correct bos_token_id, eos_token_id and pad_token_id in the config",
        )  # fmt: skip
    return RandomBody(allowed)


@dataclass(frozen=True, eq=False)
class ConstantBody:
    """The same token at every position of every prompt."""

    token: int
    spelled: str | None

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        return np.full(length, self.token, dtype=np.int64)

    def describe(self) -> dict[str, Any]:
        return {"constant_id": self.token, "constant_token": self.spelled}


def constant_body(token: int | None, seed: int, vocabulary: Vocabulary) -> ConstantBody:
    """Return a constant body of `token`; None: the first ordinary token that the seed draws for prompt 0."""
    if token is None:
        allowed = vocabulary.allowed
        token = int(allowed[draw(seed, 0, 1, below=len(allowed))[0]])
    return ConstantBody(vocabulary.check(token, "the constant token"), vocabulary.spell(token))


@dataclass(frozen=True, eq=False)
class RandomFirstBody:
    """Another body with a random ordinary token at position 0 of each prompt: the draw after the body's last one."""

    body: Body
    vocabulary: Vocabulary

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        ids, allowed = self.body.ids(seed, index, length), self.vocabulary.allowed
        ids[0] = allowed[draw(seed, index, length + 1, below=len(allowed))[-1]]
        return ids

    def describe(self) -> dict[str, Any]:
        return self.body.describe()


@dataclass(frozen=True, eq=False)
class GivenBody:
    """A table of ids given by a Python user, int64 [B, T]: prompt b is row b."""

    table: np.ndarray

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        if index >= len(self.table):
            raise InputError(
                "prompt index out of range", where="inputs", got=index,
                expected=f"0 to {len(self.table) - 1}: the table of ids has {len(self.table)} rows",
            )  # fmt: skip
        return np.array(self.table[index])

    def describe(self) -> dict[str, Any]:
        return {"ids_sha256": hashlib.sha256(self.table.astype("<i8").tobytes()).hexdigest()}


@dataclass(frozen=True, eq=False)
class DonorGivenBody:
    """Donors for given prompts, int64 [B, T]: the next row of the table, then the rows after it without column 0."""

    table: np.ndarray

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        B, T = self.table.shape
        first, others = index % FIRST_DONOR + 1, max(B - 1, 1)
        rows = [self.table[(first + step % others) % B] for step in range(1 + length // (T - 1))]
        return np.concatenate([rows[0][:1], *(row[1:] for row in rows)])[:length]

    def describe(self) -> dict[str, Any]:
        return {}


def given_body(table: object, length: int, vocabulary: Vocabulary) -> GivenBody:
    """Return a body with a copy of `table`. Raise InputError unless it is an integer table [B, length] of valid ids."""
    ids = np.asarray(table)
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or len(ids) == 0:
        raise not_a_table(ids)
    if ids.shape[1] != length:
        raise InputError(
            "the length of the given ids differs from the requested length", where="inputs",
            got=f"rows of {ids.shape[1]} tokens, length={length}", expected=f"rows of {length} tokens",
            remedy=f"pass length={ids.shape[1]}, or cut the rows",
        )  # fmt: skip
    for extreme in (ids.min(), ids.max()):
        vocabulary.check(int(extreme), "a given id")
    copy = ids.astype(np.int64)
    copy.setflags(write=False)
    return GivenBody(copy)


def not_a_table(ids: np.ndarray, remedy: str | None = None) -> InputError:
    """Return the error for ids that are not an integer table [B, T]."""
    return InputError(
        "token ids must be a table of integers with one row per prompt", where="inputs",
        got=f"shape {ids.shape}, dtype {ids.dtype}", expected="integers of shape [B, T], B at least 1", remedy=remedy,
    )  # fmt: skip
