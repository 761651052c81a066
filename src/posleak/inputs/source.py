"""The sources of prompts that `--inputs` accepts.

A source has a `text`, which names it in results, and a method `body`, which generates token ids. `register` adds a kind
of source (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

from posleak.errors import InputError, did_you_mean
from posleak.plugins import load_plugins, reject_builtin_name

from .backcopy import Backcopy
from .bodies import Body, ConstantBody, RandomBody, draw
from .corpus import TextCrops, require_text
from .vocabulary import Vocabulary


class Source(Protocol):
    """A source of prompts."""

    @property
    def text(self) -> str:
        """The value of `--inputs` that names this source."""
        ...

    def body(self, length: int, seed: int, vocabulary: Vocabulary) -> Body:
        """Return a generator of token ids for prompts of this length, or raise InputError."""
        ...


@dataclass(frozen=True)
class SourceKind:
    """A kind of source.

    forms   the texts that `--inputs` accepts, such as `constant:ID`; the text after the colon is an argument
    make    converts the argument, or an empty text, into a source; raises a ValueError if it is malformed
    """

    name: str
    forms: tuple[str, ...]
    make: Callable[[str], Source]


SOURCE_KINDS: dict[str, SourceKind] = {}
"""All registered kinds by name."""


def register(kind: SourceKind) -> None:
    """Add a kind of source, so that `--inputs NAME` and `--inputs NAME:ARGUMENT` accept it."""
    reject_builtin_name("input", kind.name, SOURCE_KINDS.get(kind.name), kind)
    SOURCE_KINDS[kind.name] = kind


def is_source_name(text: str) -> bool:
    """Return whether `text` names a source, or is a misspelling of one. Any other string is a prompt."""
    load_plugins()
    name = text.partition(":")[0]
    if name in SOURCE_KINDS or not text.strip():
        return True
    return len(text.split()) < 2 and bool(get_close_matches(name.lower(), SOURCE_KINDS, cutoff=0.6))


def parse(text: str) -> Source:
    """Return the source that `text` names. `parse(source.text) == source`.

    >>> parse("constant:42")
    ConstantToken(token=42)
    """
    load_plugins()
    name, colon, argument = text.partition(":")
    kind = SOURCE_KINDS.get(name)
    forms = [form for known in SOURCE_KINDS.values() for form in known.forms]
    if kind is None or (colon and not argument) or all((":" in form) != bool(colon) for form in kind.forms):
        raise InputError(
            "unknown source of prompts" if kind is None else f"invalid form of the source {name!r}",
            where="inputs", got=repr(text), expected=" | ".join(forms if kind is None else kind.forms),
            remedy=did_you_mean(text, forms),
        )  # fmt: skip
    try:
        return kind.make(argument)
    except ValueError as error:
        raise InputError(
            "invalid argument of a source of prompts", where="inputs", got=repr(text), expected=" | ".join(kind.forms)
        ) from error


def require_source(text: str) -> None:
    """Raise InputError if `text` names a file that does not exist, before a model is loaded.

    `parse` does not check this, since records of earlier runs may name files that no longer exist.
    """
    source = parse(text)
    if isinstance(source, TextCrops):
        require_text(source.path)


@dataclass(frozen=True)
class RandomTokens:
    """I.i.d. tokens, uniform over the vocabulary without special tokens: stationary by construction."""

    text = "random"

    def body(self, length: int, seed: int, vocabulary: Vocabulary) -> RandomBody:
        allowed = vocabulary.allowed
        if len(allowed) < 2:
            raise InputError(
                "the vocabulary is too small for random prompts", where="inputs",
                got=f"{len(allowed)} ordinary token of {vocabulary.size}", expected="at least 2 ordinary tokens",
                remedy="use --inputs constant, or correct bos_token_id, eos_token_id and pad_token_id in the config",
            )  # fmt: skip
        return RandomBody(allowed)


@dataclass(frozen=True)
class ConstantToken:
    """One token at every position: without a BOS all hidden states are equal, and all leakage is in the mask (law L2).

    token: the id; None: the first ordinary token that the seed draws for prompt 0
    """

    token: int | None = None

    @property
    def text(self) -> str:
        return "constant" if self.token is None else f"constant:{self.token}"

    def body(self, length: int, seed: int, vocabulary: Vocabulary) -> ConstantBody:
        token, allowed = self.token, vocabulary.allowed
        if token is None:
            token = int(allowed[draw(seed, 0, 1, below=len(allowed))[0]])
        return ConstantBody(vocabulary.check(token, "the constant token"), vocabulary.spell(token))


def _constant(argument: str) -> ConstantToken:
    if argument and not (argument.isascii() and argument.isdigit()):
        raise InputError(
            "the constant token must be an id", where="inputs", got=repr(f"constant:{argument}"),
            expected="constant:ID, where ID is an integer of at least 0",
            remedy="use an id, such as constant:42, or constant alone to let the seed choose a token",
        )  # fmt: skip
    return ConstantToken(int(argument) if argument else None)


register(SourceKind("random", ("random",), lambda argument: RandomTokens()))
register(SourceKind("constant", ("constant", "constant:ID"), _constant))
register(SourceKind("text", ("text:PATH", "text:stdlib"), TextCrops))
register(SourceKind("backcopy", ("backcopy",), lambda argument: Backcopy()))
