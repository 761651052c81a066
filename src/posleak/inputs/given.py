"""Prompts that a Python user passes: token ids, texts or chats, converted to one table of ids.

Prompts are never padded, and are cut only to an explicit `length`: prompts of unequal length are an error. Ids and
chats are used unchanged. The BOS of the policy is put before a text, unless the text begins with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from posleak.errors import InputError
from posleak.inputs.bodies import not_a_table
from posleak.inputs.bos import AS_GIVEN, FirstToken, resolve_first_token
from posleak.inputs.template_limits import limited_template
from posleak.inputs.vocabulary import read_vocabulary, text_configs
from posleak.text import one_line

IDS, TEXTS, CHATS = "ids", "texts", "chats"

Inputs: TypeAlias = str | Iterable[Any]
"""Inputs that a user may pass: the name of a source, a table of ids, one or several texts, one or several chats."""

FORMS = "a table of ids [B, T], a text or a list of texts, a chat (a list of messages) or a list of chats"


class ReadableSubject(Protocol):
    """The attributes of a subject that prompts depend on."""

    @property
    def model(self) -> Any: ...

    @property
    def tokenizer(self) -> Any: ...


@dataclass(frozen=True, eq=False)
class GivenPrompts:
    """Prompts passed by a user. kind: ids, texts or chats;  table: int64 [B, T];  first: the token at position 0"""

    kind: str
    table: np.ndarray
    first: FirstToken

    @classmethod
    def of_ids(cls, table: object, bos: str | int = "auto", kind: str = IDS) -> GivenPrompts:
        """Return prompts whose ids are used unchanged. Raise InputError for a BOS policy, which has no effect."""
        if bos not in ("auto", AS_GIVEN):
            why = "the chat template writes the first token" if kind == CHATS else "column 0 has the first token"
            raise InputError(
                f"a BOS policy has no effect on {kind}: {why}", where="bos", got=repr(bos),
                expected="no bos argument", remedy="write the token into column 0 of the ids, and omit bos",
            )  # fmt: skip
        return cls(kind, np.asarray(table), FirstToken(AS_GIVEN, None, None))


def read_given(
    subject: ReadableSubject,
    inputs: Inputs,
    *,
    length: int | None = None,
    prompts: int | None = None,
    bos: str | int = "auto",
) -> GivenPrompts:
    """Convert inputs to a table of ids.

    length: cut each prompt to its first `length` tokens; None: all prompts must have the same length
    prompts: use only the first `prompts` prompts; None: all
    bos: BOS policy for texts
    """
    if length is not None:
        check_length(length)
    kind, items = _items(inputs)
    items = _first_items(items, prompts)
    if kind == IDS:
        return GivenPrompts.of_ids(_table([_ids(item, k) for k, item in enumerate(items)], length), bos)
    if kind == CHATS:
        return GivenPrompts.of_ids(_table([_chat(subject.tokenizer, chat) for chat in items], length), bos, CHATS)
    tokenizer = _require_tokenizer(subject.tokenizer, "text inputs need")
    configs = text_configs(subject.model.config)
    first = resolve_first_token(bos, configs, read_vocabulary(configs, tokenizer))
    rows = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in items]
    return GivenPrompts(TEXTS, _table([_with_bos(row, first.id) for row in rows], length), first)


def check_length(length: object) -> int:
    """Return `length` as an int. Raise InputError unless it is an integer of at least 2."""
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 2:
        raise InputError("not a valid prompt length", where="length", got=repr(length), expected="at least 2 tokens")
    return int(length)


def _items(inputs: Any) -> tuple[str, list[Any]]:
    if isinstance(inputs, os.PathLike) or (isinstance(inputs, str) and _is_file(inputs)):
        raise InputError(
            "the input is a file name, not a text", where="inputs", got=repr(inputs),
            remedy=f'use "text:{os.fspath(inputs)}" for crops of the file, or pass its content as one prompt',
        )  # fmt: skip
    if isinstance(inputs, str):
        return TEXTS, [inputs]
    if isinstance(inputs, Mapping):
        encoded = "pass its input_ids, without padding, or the texts themselves"
        raise _unknown(inputs, encoded if "input_ids" in inputs else "put the message into a list: [message]")
    if not isinstance(inputs, Iterable):
        raise _unknown(inputs, None)
    items = list(_array(inputs))
    if items and all(isinstance(item, str) for item in items):
        return TEXTS, items
    if items and all(isinstance(item, Mapping) for item in items):
        return CHATS, [items]
    if items and all(_is_chat(item) for item in items):
        return CHATS, items
    if any(isinstance(item, str | Mapping) or _is_chat(item) for item in items):
        raise _unknown(inputs, "pass prompts of one kind: only ids, only texts or only chats")
    if not items or all(np.ndim(item) == 0 for item in items):
        raise not_a_table(np.asarray(_array(inputs)), "put a single prompt into a list: [ids]" if items else None)
    return IDS, items


def _is_file(text: str) -> bool:
    """Return whether a text is a single word that names an existing file."""
    return len(text.split()) == 1 and len(text) < 4096 and "\0" not in text and Path(text).is_file()


def _is_chat(item: Any) -> bool:
    messages = isinstance(item, Sequence) and not isinstance(item, str)
    return messages and len(item) > 0 and all(isinstance(message, Mapping) for message in item)


def _array(value: Any) -> Any:
    """Convert a torch tensor on any device to NumPy; return other values unchanged."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _unknown(inputs: object, remedy: str | None) -> InputError:
    got = f"{type(inputs).__name__} {inputs!r:.80}"
    return InputError("unknown kind of inputs", where="inputs", got=got, expected=FORMS, remedy=remedy)


def _first_items(items: list[Any], prompts: int | None) -> list[Any]:
    if prompts is None:
        return items
    if isinstance(prompts, bool) or not isinstance(prompts, (int, np.integer)) or not 1 <= prompts <= len(items):
        raise InputError(
            "the number of prompts does not match the inputs", where="prompts",
            got=f"prompts={prompts!r}, {len(items)} given", expected=f"1 to {len(items)}",
            remedy="omit prompts to use all inputs, or pass more inputs",
        )  # fmt: skip
    return items[: int(prompts)]


def _ids(item: Any, index: int) -> np.ndarray:
    row = np.asarray(_array(item))
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise not_a_table(row, f"correct prompt {index}")
    return row


def _with_bos(row: Sequence[int], bos: int | None) -> np.ndarray:
    """Put the BOS before the tokens of a text, unless they begin with it."""
    return np.asarray(row if bos is None or list(row[:1]) == [bos] else [bos, *row], dtype=np.int64)


def _chat(tokenizer: Any, chat: Sequence[Mapping[str, Any]]) -> np.ndarray:
    if _require_tokenizer(tokenizer, "chat inputs need").chat_template is None:
        raise InputError(
            "chat inputs need a chat template, and the tokenizer has none", where="inputs",
            remedy="set tokenizer.chat_template, or pass the chat as a text",
        )  # fmt: skip
    try:
        with limited_template():
            encoded = tokenizer.apply_chat_template(list(chat), tokenize=True, return_dict=True)
    except InputError:
        raise
    except Exception as error:  # templates may reject roles, or fail, with any exception
        raise InputError(
            "the chat template rejects this chat", where="inputs", got=one_line(error),
            expected='messages {"role": …, "content": …} in an order that the template allows',
        ) from error  # fmt: skip
    return np.asarray(encoded["input_ids"], dtype=np.int64)


def _require_tokenizer(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise InputError(
            f"{what} a tokenizer, and the model has none", where="inputs",
            remedy="pass Subject.of(model, tokenizer), or pass token ids",
        )  # fmt: skip
    return tokenizer


def _table(rows: list[np.ndarray], length: int | None) -> np.ndarray:
    """Return int64 [B, T]: rows of equal length, or rows cut to `length`."""
    lengths = [len(row) for row in rows]
    if length is None and len(set(lengths)) > 1:
        raise InputError(
            "the prompts have different lengths", where="inputs", got=f"prompts of {_listed(lengths)} tokens",
            expected="prompts of equal length, since padding is not supported",
            remedy=f"pass length={min(lengths)} to cut all prompts to the shortest, or omit the short prompts",
        )  # fmt: skip
    if length is not None and min(lengths) < length:
        short = [k for k, tokens in enumerate(lengths) if tokens < length]
        raise InputError(
            "some prompts are shorter than the requested length", where="inputs",
            got=f"length={length}, but {_listed([lengths[k] for k in short])} tokens in prompts {_listed(short)}",
            remedy=f"pass length={min(lengths)} or less, or omit these prompts",
        )  # fmt: skip
    return np.stack([row[:length] for row in rows]).astype(np.int64)


def _listed(values: list[int], most: int = 8) -> str:
    more = f" … ({len(values)} in total)" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + more
