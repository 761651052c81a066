"""docs/api.md, made from signatures and docstrings: `python -m posleak.tools.api_docs > docs/api.md`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib import import_module
from typing import Any

import posleak
from posleak.callable import written

HEAD = """\
# Python

Made by `python -m posleak.tools.api_docs`, and checked by a test to be current. `help(posleak.measure)` shows the same.
What is not on this page may change from one version to the next.

`AnyModel` is a `Subject`, a model of transformers in memory, or what `load` takes: a built-in name, a folder, a `.gguf`
file or a hub id. `Inputs` is the name of a source (`"random"`, `"constant:42"`, `"text:PATH"`), or prompts that you
have: a table of ids, a text or a list of texts, a chat or a list of chats. In a list, every string is a text. Prompts
that you have come with a warning: what their texts have at fixed places counts as leakage of position. `Given` is a
`Run`, a `Trace` or a folder. `Say` takes one text, and `Progress` two numbers: prompts done, and prompts in all.
"""

CLASSES = (
    "posleak.Subject", "posleak.Run", "posleak.trace.Trace", "posleak.claims.ClaimsRun", "posleak.claims.Result",
    "posleak.doctor.Diagnosis", "posleak.origin.Origin", "posleak.studies.Study", "posleak.studies.Table",
    "posleak.report.Comparison", "posleak.leakage.Summary", "posleak.leakage.Estimate", "posleak.show.plots.Picture",
    "posleak.probe.Edit", "posleak.probe.Observer",
)  # fmt: skip
"""What the functions return, and what a user derives own classes from."""


def page() -> str:
    """The whole page, ending in one newline."""
    parts = [HEAD, "## Functions\n"]
    parts += [entry(f"posleak.{name}", function) for name, function in functions().items()]
    parts.append("## Classes\n")
    parts += [line for path in CLASSES for line in section(path)]
    return "\n".join(parts)


def functions() -> dict[str, Callable[..., Any]]:
    """The functions of posleak, without the packages around some of them."""
    found = {name: getattr(posleak, name) for name in posleak.__all__}
    return {
        name: inspect.unwrap(each)
        for name, each in found.items()
        if not isinstance(each, str) and not inspect.isclass(each)
    }


def entry(name: str, function: Callable[..., Any]) -> str:
    """A function: its signature, its docstring, and its options as a table."""
    about, options = described(function)
    lines = [f"### `{name}`\n", f"```python\n{written(function)}\n```\n", about, ""]
    if options:
        lines += [
            "| option | |",
            "|---|---|",
            *(f"| `{option}` | {cell(text)} |" for option, text in options.items()),
            "",
        ]
    return "\n".join(lines)


def described(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What a docstring says in sentences, and its lines about parameters, by name."""
    names = "|".join(map(re.escape, inspect.signature(function).parameters)) or "$."
    sentences, options, last = list[str](), dict[str, str](), None
    for line in inspect.cleandoc(function.__doc__ or "").splitlines():
        if found := re.match(rf"({names})\s{{2,}}(\S.*)", line):
            last = found[1]
            options[last] = found[2]
        elif last is not None and line.startswith("  "):
            options[last] += f" {line.strip()}"
        else:
            sentences.append(line)
            last = None
    return "\n".join(sentences).strip(), options


def section(path: str) -> Iterator[str]:
    """A class: its docstring, its fields, and its public properties and methods with their first sentences."""
    kind = found(path)
    yield f"### `{path}`\n"
    about = inspect.cleandoc(kind.__doc__ or "")
    first, _, rest = about.partition("\n\n")
    yield f"{first}\n"
    if rest:
        yield f"```text\n{rest}\n```\n"
    yield "| | |"
    yield "|---|---|"
    for field in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        if not field.name.startswith("_"):
            yield f"| `{cell(f'{field.name}: {field.type}')}` | |"
    for name, member in members(kind).items():
        yield f"| `{cell(shown(name, member))}` | {cell(sentence(member))} |"
    yield ""


def found(path: str) -> type:
    module, _, name = path.rpartition(".")
    kind: type = getattr(import_module(module), name)
    return kind


def members(kind: type) -> dict[str, Any]:
    """Public properties and methods that the class itself defines, in their order."""
    return {
        name: member
        for name, member in vars(kind).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property | cached_property | classmethod))
    }


def function_of(member: Any) -> Callable[..., Any]:
    """What a property, a class method or a method calls."""
    if isinstance(member, property):
        assert member.fget is not None
        return member.fget
    if isinstance(member, cached_property):
        return member.func
    called: Callable[..., Any] = inspect.unwrap(getattr(member, "__func__", member))
    return called


def shown(name: str, member: Any) -> str:
    """A property as `name: type`, a method as its signature."""
    function = function_of(member)
    if isinstance(member, property | cached_property):
        return f"{name}: {inspect.signature(function).return_annotation}"
    return written(function, name, width=10**6)


def sentence(member: Any) -> str:
    """The first paragraph of what it says about itself."""
    return inspect.cleandoc(function_of(member).__doc__ or "").partition("\n\n")[0]


def cell(text: str) -> str:
    """Text that may stand in a table."""
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
