"""Token ids of prompts before the BOS policy sets position 0, and the random integers from which they are drawn.

A body always draws all T positions, and a BOS then replaces position 0. Two runs with different BOS policies therefore
have the same tokens at all other positions, and differ only in the BOS.

Random integers are the same on every machine and with every version of NumPy. NumPy guarantees the raw output of its
bit generators across versions, but not the output of `Generator` methods. Therefore only raw 64-bit words are used:

    u_0, u_1, …  =  words of PCG64(SeedSequence([seed, index]))
    draw_t       =  ⌊u_t · n / 2^64⌋,   an integer in 0 … n − 1

The relative bias of this formula is at most n / 2^64.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from posleak.errors import InputError

from .vocabulary import Vocabulary

SAMPLING_METHOD = "floor(u * n / 2**64), u from numpy PCG64(SeedSequence([seed, index])).random_raw"
SEED_LIMIT = 2**32
"""Upper limit of seeds and prompt indices: larger ones take two words of the seed sequence: streams could repeat."""

FIRST_DONOR = 2**31
"""Donors are numbered like prompts, from this index on."""


def check_seed(seed: object) -> int:
    """Return `seed` as an int, or raise InputError if it is not an integer in 0 … 2**32 − 1."""
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool) and 0 <= seed < SEED_LIMIT:
        return int(seed)
    raise InputError("not a valid seed", where="seed", got=repr(seed), expected="an integer from 0 to 2**32 - 1")


def draw(seed: int, index: int, count: int, below: int) -> np.ndarray:
    """Return int64 [count], uniform on 0 … below − 1. A longer draw begins with the shorter one.

    below: less than 2^32. The 96-bit product u·n is formed in two halves, since 64 bits cannot hold it.
    """
    if not 0 < below < 2**32:
        raise ValueError(f"draw needs 0 < below < 2**32, got {below}")
    words = np.random.PCG64(np.random.SeedSequence([seed, index])).random_raw(count).astype(np.uint64)
    n = np.uint64(below)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    carried = ((words & low) * n) >> half
    return (((words >> half) * n + carried) >> half).astype(np.int64)


class Body(Protocol):
    """A generator of token ids: the ids of prompt `index` are a function of (seed, index) alone."""

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        """Return the ids of one prompt, int64 [length]."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return facts about the origin of the tokens that results must record."""
        return {}


@dataclass(frozen=True, eq=False)
class RandomBody(Body):
    """I.i.d. tokens, uniform over the allowed ids."""

    allowed: np.ndarray

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        return np.asarray(self.allowed[draw(seed, index, length, below=len(self.allowed))])


@dataclass(frozen=True, eq=False)
class ConstantBody:
    """The same token at every position of every prompt."""

    token: int
    spelled: str | None

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        return np.full(length, self.token, dtype=np.int64)

    def describe(self) -> dict[str, Any]:
        return {"constant_id": self.token, "constant_token": self.spelled}


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
class DonorGivenBody(Body):
    """Donors for given prompts, int64 [B, T]: the next row of the table, then the rows after it without column 0."""

    table: np.ndarray

    def ids(self, seed: int, index: int, length: int) -> np.ndarray:
        B, T = self.table.shape
        first, others = index % FIRST_DONOR + 1, max(B - 1, 1)
        rows = [self.table[(first + step % others) % B] for step in range(1 + length // (T - 1))]
        return np.concatenate([rows[0][:1], *(row[1:] for row in rows)])[:length]
