"""Check how public functions are called: a misspelt argument gets the nearest known one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from posleak.errors import InputError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")


class ArgumentError(InputError, TypeError):
    """Raised when a function is called with an unknown argument or without a required one."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function so that a call which does not match its signature raises an ArgumentError."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            name, unknown = function.__name__, [key for key in kwargs if key not in signature.parameters]
            if unknown:
                raise ArgumentError(
                    "unknown argument", where=name, got=", ".join(unknown),
                    remedy="; ".join(f"{key}: {did_you_mean(key, signature.parameters)}" for key in unknown),
                ) from None  # fmt: skip
            nothing = inspect.Parameter.empty
            names = [each.replace(annotation=nothing, default=nothing) for each in signature.parameters.values()]
            raise ArgumentError(
                str(error), where=name, expected=f"{name}{inspect.Signature(names)}",
                remedy="pass arguments after the * by keyword",
            ) from None  # fmt: skip
        return function(*args, **kwargs)

    call.__module__ = "posleak"  # where pickle looks the function up
    return call
