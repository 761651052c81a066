"""The vocabulary of a model: the tokens that prompts may contain, and the policies for the token at position 0.

Prompts contain all tokens except special ones. A BOS or end-of-text token inside a prompt acts as a second origin: it
attracts attention like position 0. Padding and control tokens are hardly trained. Ids beyond the tokenizer's vocabulary
pad the embedding matrix and are never trained.

A BOS policy decides which token is at position 0. The choice is made once per run and written into the result. Position
0 attends only to itself, so its token determines the states that sink-reading heads read later. Runs with different
tokens there are not comparable, and tokenizers of one family disagree about adding a BOS.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np

from posleak.errors import InputError, did_you_mean
from posleak.text import visible

if TYPE_CHECKING:
    from posleak.models import Subject

MIN_TOKENS = 3
"""Minimum vocabulary size: `read_placements` needs three different tokens."""

POLICIES = ("auto", "tokenizer", "none")
AS_GIVEN = "as given"
_EXPECTED = " | ".join(POLICIES) + " | a token id | a token as the tokenizer spells it"
_SAMPLE_TEXT = "the position of a word"


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """The token ids of a model.

    rows       number of ids that the model can embed: 0 … rows − 1
    size       number of ids that also have a token: min(rows, size of the tokenizer)
    ordinary   bool [size]: True for tokens that are not special
    bos        the BOS that the config names, even if it is outside the vocabulary
    """

    rows: int
    size: int
    ordinary: np.ndarray
    tokenizer: Any = None
    bos: int | None = None

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


def read_vocabulary(subject: Subject) -> Vocabulary:
    """Return the vocabulary of a model from its config and its tokenizer, which may be None.

    A multimodal model may name its BOS in the config of its text model or in its whole config.
    """
    config, tokenizer = subject.model.config, subject.tokenizer
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rows = getattr(text, "vocab_size", None)
    if not isinstance(rows, int) or rows < MIN_TOKENS:
        raise InputError(
            "the vocabulary size in the model's config is missing or too small", where=type(text).__name__,
            got=f"vocab_size = {rows!r}", expected=f"an integer of at least {MIN_TOKENS}",
            remedy="correct vocab_size in the config, or choose a model with a larger vocabulary",
        )  # fmt: skip
    size = rows if tokenizer is None else min(rows, len(tokenizer))
    bos, eos, pad = (
        [token for part in (text, config) for token in _ids(getattr(part, f"{name}_token_id", None))]
        for name in ("bos", "eos", "pad")
    )
    special = [*bos, *eos, *pad]
    if tokenizer is not None:
        flagged = (token for token, added in tokenizer.added_tokens_decoder.items() if added.special)
        special += [*tokenizer.all_special_ids, *flagged]
    ordinary = np.ones(size, dtype=bool)
    ordinary[[token for token in special if 0 <= token < size]] = False
    ordinary.setflags(write=False)
    if not ordinary.any():
        raise InputError(
            "all tokens of the vocabulary are special tokens", where="inputs", got=f"{size} special tokens",
            expected="at least one ordinary token",
            remedy="correct bos_token_id, eos_token_id and pad_token_id in the config, or the special tokens",
        )  # fmt: skip
    return Vocabulary(rows, size, ordinary, tokenizer, bos[0] if bos else None)


def _ids(value: int | list[int] | None) -> list[int]:
    """Return a list of token ids: a config entry may be one id, several, or None."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


@dataclass(frozen=True)
class FirstToken:
    """A BOS policy, and the token that it puts at position 0.

    policy   `auto`, `tokenizer`, `none`, the requested token, or `as given`
    id       the token at position 0 of every prompt; None: the prompt's own first token stays there
    token    the same token as the tokenizer spells it
    """

    policy: str
    id: int | None
    token: str | None


def resolve_first_token(bos: str | int, vocabulary: Vocabulary) -> FirstToken:
    """Return the token at position 0 under policy `bos`.

    `auto`: the BOS that the config names (its first id, if it names several), else none
    `tokenizer`: the token that the tokenizer prepends by default, or none
    `none`: no BOS
    any other value: one token, by its id (an int, or digits) or by its spelling. A token that is spelled like a policy
    or a number must be given by its id.
    """
    if bos in ("auto", "none"):
        token = vocabulary.bos if bos == "auto" else None
    elif isinstance(bos, Integral) and not isinstance(bos, bool):
        token = int(bos)
    elif not isinstance(bos, str) or bos == "":
        raise InputError("not a BOS policy", where="bos", got=repr(bos), expected=_EXPECTED)
    elif re.fullmatch("-?[0-9]+", bos):
        token = int(bos)
    elif vocabulary.tokenizer is None:
        raise InputError(
            "this BOS policy needs a tokenizer, and the model has none", where="bos", got=repr(bos),
            expected="auto | none | a token id",
            remedy="pass the token id, such as --bos 1, or use --bos auto or --bos none",
        )  # fmt: skip
    else:
        token = _prepended(vocabulary.tokenizer) if bos == "tokenizer" else _spelled(bos, vocabulary.tokenizer)
    if token is None:
        return FirstToken(str(bos), None, None)
    what = "the BOS token in the model's config" if bos == "auto" else f"the BOS token (policy {str(bos)!r})"
    vocabulary.check(token, what, "use --bos none, or a token of the vocabulary: --bos TOKEN")
    return FirstToken(str(bos), token, vocabulary.spell(token))


def _prepended(tokenizer: Any) -> int | None:
    """Return the token that the tokenizer puts before a text when it adds special tokens; None if it adds none."""
    plain = list(tokenizer.encode(_SAMPLE_TEXT, add_special_tokens=False))
    whole = list(tokenizer.encode(_SAMPLE_TEXT, add_special_tokens=True))
    starts = [at for at in range(len(whole) - len(plain) + 1) if whole[at : at + len(plain)] == plain]
    if not plain or not starts or starts[0] > 1:
        raise InputError(
            "the tokenizer prepends more than one token, or changes the text", where="bos 'tokenizer'",
            got=f"{_SAMPLE_TEXT!r} becomes {plain} without and {whole} with special tokens",
            expected="at most one token before those of the text",
            remedy="choose the first token: --bos TOKEN, --bos auto or --bos none",
        )  # fmt: skip
    return int(whole[0]) if starts[0] == 1 else None


def _spelled(bos: str, tokenizer: Any) -> int:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if bos in vocabulary:
        return int(tokenizer.convert_tokens_to_ids(bos))
    plain = bos.strip().casefold()
    similar = (token for token in vocabulary if token.lstrip("Ġ▁ ").casefold() == plain)  # but for case or a space mark
    raise InputError(
        "neither a BOS policy nor a token of this model", where="bos", got=repr(bos), expected=_EXPECTED,
        remedy=did_you_mean(bos, [*POLICIES, *sorted(similar)[:5], *tokenizer.all_special_tokens[:20]]),
    )  # fmt: skip
