"""Reproducible random integers: the same on every machine and with every version of NumPy.

NumPy guarantees the raw output of its bit generators across versions, but not the output of `Generator` methods.
Therefore only raw 64-bit words are used:

    u_0, u_1, …  =  words of PCG64(SeedSequence([seed, index]))
    draw_t       =  ⌊u_t · n / 2^64⌋,   an integer in 0 … n − 1

The relative bias of this formula is at most n / 2^64.
"""

from __future__ import annotations

import numpy as np

from posleak.errors import InputError

SAMPLING_METHOD = "floor(u * n / 2**64), u from numpy PCG64(SeedSequence([seed, index])).random_raw"
SEED_LIMIT = 2**32
"""Upper limit of seeds and prompt indices: larger ones take two words of the seed sequence: streams could repeat."""

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


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
    carried = ((words & _LOW) * n) >> _HALF
    return (((words >> _HALF) * n + carried) >> _HALF).astype(np.int64)
