"""What `--inputs` takes, and the sources of prompts that it names.

A source is a value with a `text`, which results carry, and a `body`, which makes the ids. `register` adds a kind of
your own to those that `--inputs` takes (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

from posleak.errors import InputError, did_you_mean
from posleak.inputs.backcopy import Backcopy
from posleak.inputs.bodies import Body, ConstantBody, RandomBody, constant_body
from posleak.inputs.corpus import require_text
from posleak.inputs.crops import CropBody, crop_body
from posleak.inputs.vocabulary import Vocabulary
from posleak.plugins import load_plugins, reject_builtin_name


class Source(Protocol):
    """What prompts are made of."""

    @property
    def text(self) -> str:
        """How `--inputs` names it."""
        ...

    def body(self, length: int, seed: int, vocabulary: Vocabulary) -> Body:
        """The ids of prompts of this length, before their first token is set; refuses what it cannot make."""
        ...


@dataclass(frozen=True)
class SourceKind:
    """A kind of source: `forms` are what a user may write, `make` turns what stands behind the colon into a source."""

    name: str
    forms: tuple[str, ...]
    make: Callable[[str], Source]


SOURCE_KINDS: dict[str, SourceKind] = {}


def register(kind: SourceKind) -> None:
    """Let `--inputs NAME` and `--inputs NAME:ARGUMENT` name sources of this kind."""
    reject_builtin_name("input", kind.name, SOURCE_KINDS.get(kind.name), kind)
    SOURCE_KINDS[kind.name] = kind


def forms() -> tuple[str, ...]:
    """Everything that `parse` reads, for messages and help."""
    return tuple(form for kind in SOURCE_KINDS.values() for form in kind.forms)


def is_source_name(text: str) -> bool:
    """Is this what `--inputs` takes, or a misspelling of it? Any other string is a text for the model to read."""
    load_plugins()
    name = text.partition(":")[0]
    one_word = len(text.split()) < 2
    return (
        name in SOURCE_KINDS
        or (one_word and bool(get_close_matches(name.lower(), SOURCE_KINDS, cutoff=0.6)))
        or not text.strip()
    )


def parse(text: str) -> Source:
    """The source that `text` names; `parse(source.text) == source`."""
    load_plugins()
    name, colon, argument = text.partition(":")
    kind = SOURCE_KINDS.get(name)
    if kind is None or (colon and not argument) or (argument and all(":" not in form for form in kind.forms)):
        raise InputError(
            "unknown kind of input" if kind is None else "this kind of input is written otherwise",
            where="inputs", got=repr(text), expected=" | ".join(forms() if kind is None else kind.forms),
            remedy=did_you_mean(text, forms()),
        )  # fmt: skip
    try:
        return kind.make(argument)
    except ValueError as error:
        raise InputError(
            "the input cannot be read", where="inputs", got=repr(text), expected=" | ".join(kind.forms)
        ) from error


def require_source(text: str) -> None:
    """Refuse a text that is not there, before a model is loaded. Records of runs may name texts that are gone."""
    source = parse(text)
    if isinstance(source, TextCrops):
        require_text(source.path)


@dataclass(frozen=True)
class RandomTokens:
    """I.i.d. tokens, uniform over the vocabulary without its special tokens: stationary by construction."""

    @property
    def text(self) -> str:
        return "random"

    def body(self, length: int, seed: int, vocabulary: Vocabulary) -> RandomBody:
        return RandomBody(vocabulary)


@dataclass(frozen=True)
class ConstantToken:
    """One token at every place: without a BOS every hidden state is equal, and all leakage is the mask's (law L2)."""

    token: int | None = None
    """Its id; None: chosen by the seed among the tokens that are not special."""

    @property
    def text(self) -> str:
        return "constant" if self.token is None else f"constant:{self.token}"

    def body(self, length: int, seed: int, vocabulary: Vocabulary) -> ConstantBody:
        return constant_body(self.token, seed, vocabulary)


@dataclass(frozen=True)
class TextCrops:
    """Pieces from random places inside texts: natural statistics, without the look of a document's start."""

    path: str
    """A file, a folder, or `stdlib` (write `./stdlib` for a file of that name)."""

    most: int | None = None
    """Of the standard library, only about so many characters, where few crops are needed soon."""

    @property
    def text(self) -> str:
        return f"text:{self.path}"

    def body(self, length: int, seed: int, vocabulary: Vocabulary) -> CropBody:
        return crop_body(self.path, length, vocabulary, self.most)


def _constant(argument: str) -> ConstantToken:
    if argument and not (argument.isascii() and argument.isdigit()):
        raise InputError(
            "the constant token is given by its id", where="inputs", got=repr(f"constant:{argument}"),
            expected="constant:ID with ID a whole number, 0 or more",
            remedy="write the id, as in constant:42, or constant alone to let the seed choose",
        )  # fmt: skip
    return ConstantToken(int(argument) if argument else None)


def _crops(argument: str) -> TextCrops:
    if not argument:
        raise InputError(
            "which text?", where="inputs", got="text", expected="text:PATH or text:stdlib",
            remedy="name a file or a folder, as in text:book.txt, or use text:stdlib, which every Python has",
        )  # fmt: skip
    return TextCrops(argument)


register(SourceKind("random", ("random",), lambda argument: RandomTokens()))
register(SourceKind("constant", ("constant", "constant:ID"), _constant))
register(SourceKind("text", ("text:PATH", "text:stdlib"), _crops))
register(SourceKind("backcopy", ("backcopy",), lambda argument: Backcopy()))
