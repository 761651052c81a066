"""The vocabulary of a model, and which of its tokens prompts may contain: all except special tokens.

A BOS or end-of-text token inside a prompt acts as a second origin: it attracts attention like position 0. Padding and
control tokens are hardly trained. Ids beyond the tokenizer's vocabulary pad the embedding matrix and are never trained.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from posleak.errors import InputError
from posleak.text import visible

MIN_TOKENS = 3
"""Minimum vocabulary size: `read_placements` needs three different tokens."""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The token ids of a model.

    rows       number of ids that the model can embed: 0 … rows − 1
    size       number of ids that also have a token: min(rows, size of the tokenizer)
    ordinary   bool [size]: True for tokens that are not special
    """

    rows: int
    size: int
    ordinary: np.ndarray
    tokenizer: Any = None

    @property
    def allowed(self) -> np.ndarray:
        """int64 [allowed]: the ordinary ids in ascending order, from which random tokens are drawn."""
        return np.flatnonzero(self.ordinary)

    @property
    def excluded(self) -> int:
        """The number of special tokens."""
        return int(self.size - self.ordinary.sum())

    @property
    def sha256(self) -> str:
        """Hash of the allowed ids as little-endian int64: equal hashes and seeds give equal random prompts."""
        return hashlib.sha256(self.allowed.astype("<i8").tobytes()).hexdigest()

    def keep_ordinary(self, ids: np.ndarray) -> np.ndarray:
        """Return `ids` without special tokens: a text that contains `<s>` must not put a BOS inside a prompt."""
        known = ids[(ids >= 0) & (ids < self.size)]
        return np.asarray(known[self.ordinary[known]])

    def spell(self, token: int) -> str | None:
        """Return the tokenizer's spelling of an id with control characters escaped; None if it has none."""
        if self.tokenizer is None or token >= len(self.tokenizer):
            return None
        spelled = self.tokenizer.convert_ids_to_tokens(token)
        return None if spelled is None else visible(str(spelled))

    def has(self, token: int) -> bool:
        """Return whether the model can embed an id."""
        return 0 <= token < self.rows

    def check(self, token: int, what: str, remedy: str | None = None) -> int:
        """Return `token`, or raise InputError if the model cannot embed it. `what` names the token in the message."""
        if self.has(token):
            return token
        raise InputError(
            f"{what} is outside the model's vocabulary", where="inputs", got=f"token id {token}",
            expected=f"0 to {self.rows - 1}", remedy=remedy,
        )  # fmt: skip


def read_vocabulary(configs: list[Any], tokenizer: Any) -> Vocabulary:
    """Return the vocabulary of a model from its configs (`text_configs`) and its tokenizer, which may be None."""
    rows = getattr(configs[0], "vocab_size", None)
    if not isinstance(rows, int) or rows < MIN_TOKENS:
        raise InputError(
            "the vocabulary size in the model's config is missing or too small", where=type(configs[0]).__name__,
            got=f"vocab_size = {rows!r}", expected=f"an integer of at least {MIN_TOKENS}",
            remedy="correct vocab_size in the config, or choose a model with a larger vocabulary",
        )  # fmt: skip
    size = rows if tokenizer is None else min(rows, len(tokenizer))
    ordinary = np.ones(size, dtype=bool)
    ordinary[[token for token in special_ids(configs, tokenizer) if 0 <= token < size]] = False
    ordinary.setflags(write=False)
    if not ordinary.any():
        raise InputError(
            "all tokens of the vocabulary are special tokens", where="inputs", got=f"{size} special tokens",
            expected="at least one ordinary token",
            remedy="correct bos_token_id, eos_token_id and pad_token_id in the config, or the special tokens",
        )  # fmt: skip
    return Vocabulary(rows, size, ordinary, tokenizer)


def special_ids(configs: list[Any], tokenizer: Any) -> set[int]:
    """Return the BOS, EOS and padding ids of the configs, and the ids that the tokenizer flags as special."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {token for config in configs for name in names for token in id_list(getattr(config, name, None))}
    if tokenizer is not None:
        ids.update(tokenizer.all_special_ids)
        ids.update(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)
    return ids


def id_list(value: int | list[int] | None) -> list[int]:
    """Return a list of token ids: a config entry may be one id, several, or None."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def text_configs(config: Any) -> list[Any]:
    """Return the config of the text model, then the whole config: a multimodal model may name its BOS in either."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return [text] if text is config else [text, config]
