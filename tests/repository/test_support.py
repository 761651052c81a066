"""Helpers of the tests can fail: a check that accepts everything would hide errors."""

from __future__ import annotations

from typing import Any

import pytest

from posleak.errors import InputError, NoEffectError
from support.errors import raises


def length_error(kind: type[InputError] = InputError) -> InputError:
    return kind("too long", where="length", got=5000, expected="at most 2,048", remedy="use --length 2048 or less")


def test_all_fields_that_occur_are_accepted() -> None:
    with raises(InputError, where="length", got=5000, expected=("most", "2,048"), remedy="--length 2048"):
        raise length_error()


@pytest.mark.parametrize(
    "fields", [{"got": 500}, {"got": 5001}, {"remedy": "--length 20"}, {"expected": ("most", "64")}, {"bound": 1}]
)
def test_another_value_fails(fields: dict[str, Any]) -> None:
    with pytest.raises(AssertionError), raises(InputError, **fields):
        raise length_error()


def test_a_subclass_and_no_error_fail() -> None:
    with pytest.raises(AssertionError), raises(InputError, got=5000):
        raise length_error(NoEffectError)
    with pytest.raises(pytest.fail.Exception), raises(InputError):
        pass
