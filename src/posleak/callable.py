"""How posleak's functions are called from Python: a misspelt argument gets the nearest known one, and packages that
share their name with their one function are that function, too."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any

from posleak.errors import InputError, did_you_mean


class ArgumentError(InputError, TypeError):
    """A function was called with arguments that it does not have, or without one that it needs."""


@cache
def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; a call that does not fit its signature is an ArgumentError that says what would."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        try:
            signature.bind(*values, **named)
        except TypeError as error:
            raise _wrong_call(function.__name__, signature, named, error) from None
        return function(*values, **named)

    call.__module__ = "posleak"  # where it is found again, when it is unpickled in another process
    return call


def _wrong_call(name: str, signature: inspect.Signature, named: dict[str, Any], error: TypeError) -> ArgumentError:
    unknown = [key for key in named if key not in signature.parameters]
    if unknown:
        return ArgumentError(
            "no argument of this name", where=name, got=", ".join(unknown),
            remedy="; ".join(f"{key}: {did_you_mean(key, signature.parameters)}" for key in unknown),
        )  # fmt: skip
    nothing = inspect.Parameter.empty
    names = [each.replace(annotation=nothing, default=nothing) for each in signature.parameters.values()]
    return ArgumentError(
        str(error), where=name, expected=f"{name}{inspect.Signature(names)}", remedy="those after the * must be named"
    )


def call_as(module: str, function: Callable[..., Any]) -> None:
    """Let the package be called: `posleak.report(runs, "page.html")` is `posleak.report.report(runs, "page.html")`.

    Importing one must not hide the other, so that the package is what `posleak.report` always gives.
    """
    package: Any = sys.modules[module]
    package.__class__ = type("CallablePackage", (ModuleType,), {"__call__": staticmethod(checked(function))})
    package.__signature__ = inspect.signature(function)
    package.__wrapped__ = function
    first, _, rest = inspect.cleandoc(package.__doc__ or "").partition("\n\n")  # help() shows the first line as a title
    about = inspect.cleandoc(function.__doc__ or "")
    package.__doc__ = f"{first}\n\n{written(function)}\n\n{textwrap.indent(about, '    ')}\n\n{rest}"


def written(function: Callable[..., Any], name: str | None = None, width: int = 100) -> str:
    """A signature as it stands in the code, types without quotes, on one line or with one line per parameter.

    The first parameter of a method is left out. A default that is no plain value is written as `…`.
    """
    signature = inspect.signature(function)
    named = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    found, star = list[str](), False
    for each in named:
        if each.kind is each.KEYWORD_ONLY and not star:
            found.append("*")
        star = star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        found.append(_parameter(each))
    returned = "" if signature.return_annotation is signature.empty else f" -> {_type(signature.return_annotation)}"
    head, line = name or function.__name__, ", ".join(found)
    if len(head) + len(line) + len(returned) + 2 <= width:
        return f"{head}({line}){returned}"
    return f"{head}(\n" + "".join(f"    {each},\n" for each in found) + f"){returned}"


def _parameter(each: inspect.Parameter) -> str:
    stars = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
    text = stars + each.name
    if each.annotation is not each.empty:
        text += f": {_type(each.annotation)}"
    if each.default is each.empty:
        return text
    simple = each.default is None or isinstance(each.default, str | int | float | tuple)
    equals = " = " if each.annotation is not each.empty else "="
    return f"{text}{equals}{each.default!r}" if simple else f"{text}{equals}…"


def _type(annotation: Any) -> str:
    return str(annotation) if isinstance(annotation, str) else inspect.formatannotation(annotation)
