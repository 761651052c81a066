"""Expect errors and warnings by their content: type, value, bound, path and remedy, but not the wording around them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

from posleak.errors import PosleakError

E = TypeVar("E", bound=PosleakError)
FIELDS = ("where", "what", "got", "expected", "remedy")


@contextmanager
def raises(kind: type[E], **fields: object) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of this class, not of a subclass, whose fields contain these texts.

    fields      `where`, `what`, `got`, `expected`, `remedy`: a value whose text must occur in the field, or a tuple of
                values that must all occur

    >>> with raises(InputError, got=5000, expected=("1", "2048"), remedy="--length 2048"):
    ...     measure(subject, length=5000)
    """
    with pytest.raises(kind) as caught:
        yield caught
    assert type(caught.value) is kind
    assert_fields(caught.value, **fields)


def assert_fields(error: PosleakError, **fields: object) -> None:
    """Assert that fields of the error contain these texts; see `raises`."""
    assert set(fields) <= set(FIELDS), f"unknown fields: {set(fields) - set(FIELDS)}"
    for name, parts in fields.items():
        text = str(getattr(error, name))
        for part in parts if isinstance(parts, tuple) else (parts,):
            assert contains(text, str(part)), f"{name}: {part!r} is not in {text!r}; {error}"


def contains(text: str, part: str) -> bool:
    """Return whether the part occurs in the text; a number does not occur inside of a longer one."""
    before, after = (r"(?<![\d.])" if part[:1].isdigit() else "", r"(?!\d|\.\d)" if part[-1:].isdigit() else "")
    return re.search(before + re.escape(part) + after, text) is not None


def mentions(*parts: Any) -> str:
    """Return a pattern for `match`: the parts in this order, with anything between them."""
    return r"[\s\S]*".join(re.escape(str(part)) for part in parts)
