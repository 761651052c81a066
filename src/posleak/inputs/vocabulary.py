"""Which tokens a prompt may hold: the vocabulary without its special tokens.

A BOS or an end-of-text in the middle of a prompt is a second origin for the model: attention sinks on it. Padding and
control tokens are hardly trained. Ids past the tokenizer's end are padding of the embedding matrix, never trained.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from posleak.errors import InputError
from posleak.text import visible

MIN_TOKENS = 3
"""Tokens that a model must have: how it encodes positions is read from three different ones (`read_placements`)."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The ids of one model, and which of them are ordinary."""

    rows: int
    """Ids that the model can embed: 0 … rows − 1. What a user asks for by id must be one of these."""
    size: int
    """Ids that also have a token: min(rows, length of the tokenizer)."""
    ordinary: np.ndarray
    """bool [size]: not special."""
    tokenizer: Any = None

    @property
    def allowed(self) -> np.ndarray:
        """int64 [allowed]: ordinary ids, ascending; what random tokens are drawn from."""
        return np.flatnonzero(self.ordinary)

    @property
    def excluded(self) -> int:
        """How many of the `size` ids are special."""
        return int(self.size - self.ordinary.sum())

    @property
    def sha256(self) -> str:
        """Of the allowed ids as little-endian int64: equal hashes and seeds mean equal random prompts."""
        return hashlib.sha256(self.allowed.astype("<i8").tobytes()).hexdigest()

    def keep_ordinary(self, ids: np.ndarray) -> np.ndarray:
        """`ids` without special ones; a text that spells out `<s>` must not put a BOS into the middle of a prompt."""
        known = ids[(ids >= 0) & (ids < self.size)]
        return np.asarray(known[self.ordinary[known]])

    def spell(self, token: int) -> str | None:
        """The token as the tokenizer writes it, control characters spelled out, which files of results cannot hold.

        None without a tokenizer, or for an id that it does not know.
        """
        if self.tokenizer is None or token >= len(self.tokenizer):
            return None
        spelled = self.tokenizer.convert_ids_to_tokens(token)
        return None if spelled is None else visible(str(spelled))

    def check(self, token: int, what: str, remedy: str | None = None) -> int:
        """`token` itself, if the model has an embedding for it."""
        if self.has(token):
            return token
        raise InputError(
            f"{what} is outside the model's vocabulary", where="inputs", got=token,
            expected=f"0 to {self.rows - 1}", remedy=remedy,
        )  # fmt: skip

    def has(self, token: int) -> bool:
        """Can the model embed it?"""
        return 0 <= token < self.rows


def read_vocabulary(configs: list[Any], tokenizer: Any) -> Vocabulary:
    """The vocabulary of a model, from its configs (that of the text part first) and its tokenizer, if it has one."""
    rows = getattr(configs[0], "vocab_size", None)
    if not isinstance(rows, int) or rows < MIN_TOKENS:
        raise InputError(
            "the model's config does not say how large its vocabulary is, or names too few tokens",
            where=type(configs[0]).__name__,
            got=f"vocab_size = {rows!r}",
            expected=f"a whole number, {MIN_TOKENS} or more",
            remedy="correct vocab_size in the config, or choose a model with more tokens",
        )
    size = rows if tokenizer is None else min(rows, len(tokenizer))
    ordinary = np.ones(size, dtype=bool)
    ordinary[[token for token in special_ids(configs, tokenizer) if 0 <= token < size]] = False
    ordinary.setflags(write=False)
    if not ordinary.any():
        raise InputError(
            "every token of the vocabulary is special", where="inputs", got=f"{size} tokens",
            remedy="correct bos_token_id, eos_token_id and pad_token_id in the config, or the special tokens",
        )  # fmt: skip
    return Vocabulary(rows, size, ordinary, tokenizer)


def special_ids(configs: list[Any], tokenizer: Any) -> set[int]:
    """What a config names as BOS, EOS or padding, and what the tokenizer flags as special."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {token for config in configs for name in names for token in id_list(getattr(config, name, None))}
    if tokenizer is not None:
        ids.update(tokenizer.all_special_ids)
        ids.update(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)
    return ids


def id_list(value: int | list[int] | None) -> list[int]:
    """Configs give one id, several, or none."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def text_configs(config: Any) -> list[Any]:
    """The text part of the config, then the whole: a model of several modalities may name its BOS in either."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return [text] if text is config else [text, config]
