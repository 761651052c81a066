"""Prompts that a Python user passes: token ids, texts or chats, converted to one table of ids.

Prompts are never padded, and are cut only to an explicit `length`: prompts of unequal length are an error. Ids and
chats are used unchanged. The BOS of the policy is put before a text, unless the text begins with it.

A chat template is a program written by the model's author. transformers runs it in a sandbox that limits each `range`,
but neither nested loops nor the output length; `limited_template` limits its run time and its output.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from posleak.errors import InputError
from posleak.text import one_line

from .bodies import GivenBody
from .vocabulary import AS_GIVEN, FirstToken, Vocabulary, read_vocabulary, resolve_first_token

if TYPE_CHECKING:
    from posleak.models import Subject

IDS, TEXTS, CHATS = "ids", "texts", "chats"

Inputs: TypeAlias = str | Iterable[Any]
"""Inputs that a user may pass: the name of a source, a table of ids, one or several texts, one or several chats."""

FORMS = "a table of ids [B, T], a text or a list of texts, a chat (a list of messages) or a list of chats"

TEMPLATE_SECONDS = 10.0
"""CPU time limit for one chat; templates take milliseconds."""
TEMPLATE_CHARACTERS = 1 << 24


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

    def body(self, length: int, vocabulary: Vocabulary) -> GivenBody:
        """Copy the table. Raise InputError unless it is an integer table [B, length] of valid ids."""
        ids = self.table
        if ids.ndim != 2 or ids.dtype.kind not in "iu" or len(ids) == 0:
            raise _not_a_table(ids)
        if ids.shape[1] != length:
            raise InputError(
                "the length of the given ids differs from the requested length", where="inputs",
                got=f"rows of {ids.shape[1]} tokens, length={length}", expected=f"rows of {length} tokens",
                remedy=f"pass length={ids.shape[1]}, or truncate the rows",
            )  # fmt: skip
        for extreme in (ids.min(), ids.max()):
            vocabulary.check(int(extreme), "a given id")
        copy = ids.astype(np.int64)
        copy.setflags(write=False)
        return GivenBody(copy)


def read_given(
    subject: Subject,
    inputs: Inputs,
    *,
    length: int | None = None,
    prompts: int | None = None,
    bos: str | int = "auto",
) -> GivenPrompts:
    """Convert inputs to a table of ids.

    length: truncate each prompt to its first `length` tokens; None: all prompts must have the same length
    prompts: use only the first `prompts` prompts; None: all
    bos: BOS policy for texts
    """
    if length is not None:
        check_length(length)
    kind, items = _items(inputs)
    if prompts is not None:
        if isinstance(prompts, bool) or not isinstance(prompts, (int, np.integer)) or not 1 <= prompts <= len(items):
            raise InputError(
                "the number of prompts does not match the inputs", where="prompts",
                got=f"prompts={prompts!r}, {len(items)} given", expected=f"1 to {len(items)}",
                remedy="omit prompts to use all inputs, or pass more inputs",
            )  # fmt: skip
        items = items[: int(prompts)]
    if kind == IDS:
        table = [np.asarray(_array(item)) for item in items]
        for k, row in enumerate(table):
            if row.ndim != 1 or row.dtype.kind not in "iu":
                raise _not_a_table(row, f"correct prompt {k}")
        return GivenPrompts.of_ids(_table(table, length), bos)
    if kind == CHATS:
        return GivenPrompts.of_ids(_table([_chat(subject.tokenizer, chat) for chat in items], length), bos, CHATS)
    tokenizer = _require_tokenizer(subject.tokenizer, "text inputs need")
    first = resolve_first_token(bos, read_vocabulary(subject))
    rows = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in items]
    if first.id is not None:
        rows = [row if row[:1] == [first.id] else [first.id, *row] for row in rows]
    return GivenPrompts(TEXTS, _table(rows, length), first)


def check_length(length: object) -> int:
    """Return `length` as an int. Raise InputError unless it is an integer of at least 2."""
    if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 2:
        raise InputError("not a valid prompt length", where="length", got=repr(length), expected="at least 2 tokens")
    return int(length)


def _items(inputs: Any) -> tuple[str, list[Any]]:
    """Return the kind of the inputs, and the prompts as a list."""
    one_word = isinstance(inputs, str) and len(inputs.split()) == 1 and len(inputs) < 4096 and "\0" not in inputs
    if isinstance(inputs, os.PathLike) or (one_word and Path(inputs).is_file()):
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
        raise _not_a_table(np.asarray(_array(inputs)), "put a single prompt into a list: [ids]" if items else None)
    return IDS, items


def _is_chat(item: Any) -> bool:
    messages = isinstance(item, Sequence) and not isinstance(item, str)
    return messages and len(item) > 0 and all(isinstance(message, Mapping) for message in item)


def _array(value: Any) -> Any:
    """Convert a torch tensor on any device to NumPy; return other values unchanged."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


def _unknown(inputs: object, remedy: str | None) -> InputError:
    got = f"{type(inputs).__name__} {inputs!r:.80}"
    return InputError("unknown kind of inputs", where="inputs", got=got, expected=FORMS, remedy=remedy)


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


@contextmanager
def limited_template() -> Iterator[None]:
    """Raise InputError in the `with` block if a chat template takes too long or writes too much.

    A trace function of this thread is called for every line of the template and of jinja2, and for no other code. It
    cannot interrupt a single operation, such as a power of large numbers. A debugger's trace function is restored.
    """
    deadline, written, before = time.thread_time() + TEMPLATE_SECONDS, 0, sys.gettrace()

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal written
        module = str(frame.f_globals.get("__name__", ""))
        if frame.f_code.co_filename != "<template>" and module.partition(".")[0] != "jinja2":
            return None
        if event == "return" and isinstance(value, str):  # values that a generator yields are included
            written += len(value)
        if written <= TEMPLATE_CHARACTERS and time.thread_time() <= deadline:
            return trace
        slow = written <= TEMPLATE_CHARACTERS
        limit = f"{TEMPLATE_SECONDS:g} s of CPU time for one chat" if slow else f"{TEMPLATE_CHARACTERS:,} characters"
        raise InputError(
            f"the chat template {'takes too long' if slow else 'writes too much'} and was stopped", where="inputs",
            got=f"more than {limit}",
            remedy="check tokenizer.chat_template and set another one, or pass the chat as a text",
        )  # fmt: skip

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _require_tokenizer(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise InputError(
            f"{what} a tokenizer, and the model has none", where="inputs",
            remedy="pass Subject.of(model, tokenizer), or pass token ids",
        )  # fmt: skip
    return tokenizer


def _table(rows: Sequence[Any], length: int | None) -> np.ndarray:
    """Return int64 [B, T]: rows of equal length, or rows cut to `length`."""
    lengths = [len(row) for row in rows]
    if length is None and len(set(lengths)) > 1:
        raise InputError(
            "the prompts have different lengths", where="inputs", got=f"prompts of {_listed(lengths)} tokens",
            expected="prompts of equal length, since padding is not supported",
            remedy=f"pass length={min(lengths)} to truncate all prompts to the shortest, or omit the short prompts",
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


def _not_a_table(ids: np.ndarray, remedy: str | None = None) -> InputError:
    """Return the error for ids that are not an integer table [B, T]."""
    return InputError(
        "token ids must be a table of integers with one row per prompt", where="inputs",
        got=f"shape {ids.shape}, dtype {ids.dtype}", expected="integers of shape [B, T], B at least 1", remedy=remedy,
    )  # fmt: skip
