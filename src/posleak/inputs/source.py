"""The words in which a user says what the model shall read, and the values they stand for."""

from __future__ import annotations

from dataclasses import dataclass

from posleak.errors import InputError, did_you_mean

FORMS = ("random", "constant", "constant:ID", "text:PATH", "text:stdlib")
STDLIB = "stdlib"


@dataclass(frozen=True)
class RandomTokens:
    """I.i.d. tokens, uniform over the vocabulary without its special tokens: stationary by construction."""

    @property
    def text(self) -> str:
        return "random"


@dataclass(frozen=True)
class ConstantToken:
    """One token at every place: without a BOS every hidden state is equal, and all leakage is the mask's (law L2)."""

    token: int | None = None
    """Its id; None: chosen by the seed among the tokens that are not special."""

    @property
    def text(self) -> str:
        return "constant" if self.token is None else f"constant:{self.token}"


@dataclass(frozen=True)
class TextCrops:
    """Pieces from random places inside texts: natural statistics, without the look of a document's start."""

    path: str
    """A file, a folder, or `stdlib` (write `./stdlib` for a file of that name)."""

    @property
    def text(self) -> str:
        return f"text:{self.path}"


Source = RandomTokens | ConstantToken | TextCrops


def parse(text: str) -> Source:
    """The source that `text` names; `parse(source.text) == source`."""
    kind, colon, argument = text.partition(":")
    if kind == "random" and not colon:
        return RandomTokens()
    if kind == "constant":
        return ConstantToken(_token_id(text, argument) if colon else None)
    if kind == "text":
        return TextCrops(_path(text, argument))
    raise InputError(
        "unknown kind of input",
        where="inputs",
        got=repr(text),
        expected=" | ".join(FORMS),
        remedy=did_you_mean(text, FORMS),
    )


def _token_id(text: str, argument: str) -> int:
    if argument.isascii() and argument.isdigit():
        return int(argument)
    raise InputError(
        "the constant token is given by its id",
        where="inputs",
        got=repr(text),
        expected="constant:ID with ID a whole number, 0 or more",
        remedy="write the id, as in constant:42, or constant alone to let the seed choose",
    )


def _path(text: str, argument: str) -> str:
    if argument:
        return argument
    raise InputError(
        "which text?",
        where="inputs",
        got=repr(text),
        expected="text:PATH or text:stdlib",
        remedy="name a file or a folder, as in text:book.txt, or use text:stdlib, which every Python has",
    )
