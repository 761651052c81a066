"""Prompts before their first token is set: where the ids come from.

A body always draws all T places, and the BOS is then written over place 0. So two runs with different BOS policies read
the same tokens at the same positions, and their difference is the BOS alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from posleak.errors import InputError
from posleak.inputs.randomness import draw
from posleak.inputs.vocabulary import Vocabulary

FIRST_DONOR = 2**31
"""Documents that stand before prompts are numbered from here on, like prompts of their own."""


class Body(Protocol):
    """Ids of prompt `index`, a function of (seed, index) alone, and what must be recorded of where they came from."""

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        """int64 [length]"""
        ...

    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True, eq=False)
class RandomBody:
    """I.i.d. tokens, uniform over the allowed ids."""

    vocabulary: Vocabulary
    _allowed: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_allowed", self.vocabulary.allowed)
        if len(self._allowed) < 2:
            raise InputError(
                "the vocabulary is too small for random prompts", where="inputs",
                got=f"{len(self._allowed)} token that is not special, of {self.vocabulary.size}", expected="2 or more",
                remedy="measure it with --inputs constant, or correct bos_token_id, eos_token_id and pad_token_id",
            )  # fmt: skip

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        return np.asarray(self._allowed[draw(seed, index, length, below=len(self._allowed))])

    def describe(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, eq=False)
class ConstantBody:
    """The same token everywhere, in every prompt."""

    token: int
    spelled: str | None

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        return np.full(length, self.token, dtype=np.int64)

    def describe(self) -> dict[str, Any]:
        return {"constant_id": self.token, "constant_token": self.spelled}


def constant_body(token: int | None, seed: int, vocabulary: Vocabulary) -> ConstantBody:
    """`token`, or the first ordinary token that the seed draws for prompt 0."""
    if token is None:
        allowed = vocabulary.allowed
        token = int(allowed[draw(seed, 0, 1, below=len(allowed))[0]])
    return ConstantBody(vocabulary.check(token, "the constant token"), vocabulary.spell(token))


@dataclass(frozen=True, eq=False)
class RandomFirstBody:
    """Another body, with a random ordinary token at place 0, another in each prompt: the draw after the body's last."""

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
    """Ids handed over by a Python user, in order; there are only as many prompts as rows."""

    table: np.ndarray
    """int64 [B, T]"""

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        if index >= len(self.table):
            raise InputError("no such prompt among the ids given", where="inputs", got=index, expected=self._range())
        return np.array(self.table[index])

    def describe(self) -> dict[str, Any]:
        return {"ids_sha256": hashlib.sha256(self.table.astype("<i8").tobytes()).hexdigest()}

    def _range(self) -> str:
        return f"an index from 0 to {len(self.table) - 1}, for there are {len(self.table)} rows"


@dataclass(frozen=True, eq=False)
class DonorGivenBody:
    """For each given row a longer one, made of the next rows in turn: the first of them whole, then their bodies."""

    table: np.ndarray
    """int64 [B, T]"""

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        B, T = self.table.shape
        others = [
            self.table[(index % FIRST_DONOR + 1 + step % max(B - 1, 1)) % B] for step in range(1 + length // (T - 1))
        ]
        return np.concatenate([others[0][:1], *(row[1:] for row in others)])[:length]

    def describe(self) -> dict[str, Any]:
        return {}


def given_body(table: object, length: int, vocabulary: Vocabulary) -> GivenBody:
    """A private copy of `table`, checked: [B, T], whole numbers, T = length, all in the vocabulary."""
    ids = np.asarray(table)
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or len(ids) == 0:
        raise not_a_table(ids)
    if ids.shape[1] != length:
        raise InputError(
            "the ids given are not as long as the length asked for",
            where="inputs",
            got=f"rows of {ids.shape[1]} tokens, length={length}",
            expected="rows of that length",
            remedy=f"pass length={ids.shape[1]}, or cut the rows",
        )
    for worst in (ids.min(), ids.max()):
        vocabulary.check(int(worst), "an id given")
    copy = ids.astype(np.int64)
    copy.setflags(write=False)
    return GivenBody(copy)


def not_a_table(ids: np.ndarray, remedy: str | None = None) -> InputError:
    return InputError(
        "ids must be a table of whole numbers, one row per prompt", where="inputs",
        got=f"shape {ids.shape}, dtype {ids.dtype}", expected="int64 [B, T] with B of 1 or more", remedy=remedy,
    )  # fmt: skip
