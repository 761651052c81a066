"""The one source of randomness: numbers that are the same on every machine and with every numpy.

numpy promises that the raw output of a bit generator never changes; it does not promise that for what `Generator`
makes of it. So only raw words are taken, and turned into indices by a formula that anyone can repeat:

    u_0, u_1, …  =  the 64-bit words of PCG64(SeedSequence([seed, index]))
    draw_t       =  ⌊u_t · n / 2^64⌋,   an index in 0 … n − 1

The formula favours some indices by at most n / 2^64 relative to the others, which nothing here could measure.
"""

from __future__ import annotations

import numpy as np

from posleak.errors import InputError

SAMPLING_METHOD = "floor(u * n / 2**64), u from numpy PCG64(SeedSequence([seed, index])).random_raw"
SEED_LIMIT = 2**32
"""Of seeds and indices: larger ones fill two words of the seed sequence, and could share a stream with another pair."""

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


def check_seed(seed: object) -> int:
    """`seed` itself, if no two prompts can share a stream under it."""
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, bool) and 0 <= seed < SEED_LIMIT:
        return int(seed)
    raise InputError("not a seed", where="inputs", got=repr(seed), expected="a whole number from 0 to 2**32 - 1")


def draw(seed: int, index: int, count: int, below: int) -> np.ndarray:
    """int64 [count], each uniform on 0 … below − 1; a longer draw starts with the shorter one.

    `below` must be under 2^32. The 96-bit product u·n is formed in two halves, since 64 bits cannot hold it.
    """
    if not 0 < below < 2**32:
        raise ValueError(f"draw needs 0 < below < 2**32, got {below}")
    words = np.random.PCG64(np.random.SeedSequence([seed, index])).random_raw(count).astype(np.uint64)
    n = np.uint64(below)
    carried = ((words & _LOW) * n) >> _HALF
    return (((words >> _HALF) * n + carried) >> _HALF).astype(np.int64)
