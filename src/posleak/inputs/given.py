"""Prompts that a Python user hands over: ids, texts or chats -> one table of ids.

Nothing is padded, and nothing is cut unless `length` or `prompts` says so: prompts of different lengths are an error
that names them. Ids and chats are read as they stand; before a text goes the BOS that the policy names, unless the text
has it already.
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
"""What a user may write: the name of a source, a table of ids, a text or several, a chat or several."""

FORMS = "a table of ids [B, T], a text or a list of texts, a chat (a list of messages) or a list of chats"


class ReadableSubject(Protocol):
    """What this stage needs of a subject."""

    @property
    def model(self) -> Any: ...

    @property
    def tokenizer(self) -> Any: ...


@dataclass(frozen=True, eq=False)
class GivenPrompts:
    """kind: ids, texts or chats;  table: int64 [B, T];  first: which token stands at position 0, and by which rule"""

    kind: str
    table: np.ndarray
    first: FirstToken

    @classmethod
    def of_ids(cls, table: object, bos: str | int = "auto", kind: str = IDS) -> GivenPrompts:
        """Prompts that are read as they stand; a BOS policy beside them would do nothing and is refused."""
        if bos not in ("auto", AS_GIVEN):
            whose = "a chat template writes the first token itself" if kind == CHATS else "ids already have one"
            raise InputError(
                f"no BOS policy acts on {kind} that are given: {whose}", where="inputs", got=f"bos={bos!r}",
                expected="no BOS policy", remedy="write the token into column 0 of ids, and leave bos out",
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
    """The first `prompts` of what was given (None: all), each cut to its first `length` tokens (None: equally long)."""
    if length is not None:
        check_length(length)
    kind, items = _items(inputs)
    items = _first_items(items, prompts)
    if kind == IDS:
        return GivenPrompts.of_ids(_table([_ids(item, k) for k, item in enumerate(items)], length), bos)
    if kind == CHATS:
        return GivenPrompts.of_ids(_table([_chat(subject.tokenizer, chat) for chat in items], length), bos, CHATS)
    tokenizer = _require_tokenizer(subject.tokenizer, "a text")
    configs = text_configs(subject.model.config)
    first = resolve_first_token(bos, configs, read_vocabulary(configs, tokenizer))
    rows = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in items]
    return GivenPrompts(TEXTS, _table([_begun(row, first.id) for row in rows], length), first)


def check_length(length: object) -> int:
    """`length` itself, if a prompt can be so long."""
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 2:
        raise InputError("not the length of a prompt", where="inputs", got=repr(length), expected="2 or more tokens")
    return int(length)


def _items(inputs: Any) -> tuple[str, list[Any]]:
    """What was given, prompt by prompt, and of which kind it is."""
    if isinstance(inputs, os.PathLike) or (isinstance(inputs, str) and _is_file(inputs)):
        raise InputError(
            "this is the name of a file, not a text", where="inputs", got=repr(inputs),
            remedy=f'"text:{os.fspath(inputs)}" takes crops from it; to read it as one prompt, pass its content',
        )  # fmt: skip
    if isinstance(inputs, str):
        return TEXTS, [inputs]
    if isinstance(inputs, Mapping) or not isinstance(inputs, Iterable):
        encoded = isinstance(inputs, Mapping) and "input_ids" in inputs
        raise _unknown(
            inputs, "pass its input_ids, without padding, or the texts themselves" if encoded else
            "put the message into a list" if isinstance(inputs, Mapping) else None,
        )  # fmt: skip
    items = list(_array(inputs))
    if items and all(isinstance(item, str) for item in items):
        return TEXTS, items
    if items and all(isinstance(item, Mapping) for item in items):
        return CHATS, [items]
    if items and all(_is_chat(item) for item in items):
        return CHATS, items
    if any(isinstance(item, str | Mapping) or _is_chat(item) for item in items):
        raise _unknown(inputs, "give prompts of one kind")
    if not items or all(np.ndim(item) == 0 for item in items):
        raise not_a_table(np.asarray(_array(inputs)), "put one prompt into a list: [ids]" if items else None)
    return IDS, items


def _is_file(text: str) -> bool:
    """Is this one word that names a file which exists?"""
    return len(text.split()) == 1 and len(text) < 4096 and "\0" not in text and Path(text).is_file()


def _is_chat(item: Any) -> bool:
    messages = isinstance(item, Sequence) and not isinstance(item, str)
    return messages and len(item) > 0 and all(isinstance(message, Mapping) for message in item)


def _array(value: Any) -> Any:
    """A torch tensor as numpy's, wherever it is; anything else as it is."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _unknown(inputs: object, remedy: str | None) -> InputError:
    return InputError(
        "these are no prompts", where="inputs", got=f"{type(inputs).__name__} {inputs!r:.80}", expected=FORMS,
        remedy=remedy,
    )  # fmt: skip


def _first_items(items: list[Any], prompts: int | None) -> list[Any]:
    if prompts is None:
        return items
    if isinstance(prompts, bool) or not isinstance(prompts, (int, np.integer)) or not 1 <= prompts <= len(items):
        raise InputError(
            "there are not so many prompts among those given", where="inputs",
            got=f"prompts={prompts!r}, {len(items)} given", expected=f"1 to {len(items)}",
            remedy="leave prompts out to read all of them, or give more",
        )  # fmt: skip
    return items[: int(prompts)]


def _ids(item: Any, index: int) -> np.ndarray:
    row = np.asarray(_array(item))
    if row.ndim != 1 or row.dtype.kind not in "iu":
        raise not_a_table(row, f"correct prompt {index}")
    return row


def _begun(row: Sequence[int], bos: int | None) -> np.ndarray:
    """The text's tokens after the BOS, which is not put before a text that begins with it."""
    return np.asarray(row if bos is None or list(row[:1]) == [bos] else [bos, *row], dtype=np.int64)


def _chat(tokenizer: Any, chat: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """The ids of one chat, as the tokenizer's template writes it."""
    if _require_tokenizer(tokenizer, "a chat").chat_template is None:
        raise InputError(
            "a chat needs a chat template, and the tokenizer has none", where="inputs",
            remedy="set tokenizer.chat_template, or write the chat as a text",
        )  # fmt: skip
    try:
        with limited_template():
            encoded = tokenizer.apply_chat_template(list(chat), tokenize=True, return_dict=True)
    except InputError:
        raise
    except Exception as error:  # a template may refuse roles, or fail, in any way that its author chose
        raise InputError(
            "the chat template cannot write this chat", where="inputs", got=one_line(error),
            expected='messages {"role": …, "content": …} in an order that the template allows',
        ) from error  # fmt: skip
    return np.asarray(encoded["input_ids"], dtype=np.int64)


def _require_tokenizer(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise InputError(
            f"{what} needs a tokenizer, and the model has none", where="inputs",
            remedy="pass Subject.of(model, tokenizer), or give ids",
        )  # fmt: skip
    return tokenizer


def _table(rows: list[np.ndarray], length: int | None) -> np.ndarray:
    """int64 [B, T]: rows of one length, or cut to the length that was asked for."""
    lengths = [len(row) for row in rows]
    if length is None and len(set(lengths)) > 1:
        raise InputError(
            "the prompts are not equally long", where="inputs", got=f"prompts of {_shown(lengths)} tokens",
            expected="prompts of one length: no padding is measured",
            remedy=f"pass length={min(lengths)} to cut all to the shortest, or a larger length and longer prompts only",
        )  # fmt: skip
    if length is not None and min(lengths) < length:
        short = [k for k, each in enumerate(lengths) if each < length]
        raise InputError(
            "prompts are shorter than the length asked for", where="inputs",
            got=f"length={length}, and {_shown([lengths[k] for k in short])} tokens in prompts {_shown(short)}",
            remedy=f"pass length={min(lengths)} or less, or leave these prompts out",
        )  # fmt: skip
    return np.stack([row[:length] for row in rows]).astype(np.int64)


def _shown(numbers: list[int], most: int = 8) -> str:
    more = f" … ({len(numbers)} in all)" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more
