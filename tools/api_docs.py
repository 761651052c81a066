"""How docs/api.md is filled from docstrings: an extension of griffe, with which mkdocstrings reads the code.

It knows what griffe cannot: that parameters and fields are described in aligned lines (`name   text`), that some
packages can be called like the function of their name, and what the constants are that stand as defaults.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

import griffe

_ALIGNED = re.compile(r"([\w*]+(?:, [\w*]+)*) {2,}(\S.*)")
_ALSO = re.compile(r"; {2,}([\w, ]+): ")
_PAGE = re.compile(r"(?<!\[)\bdocs/(\w+)\.md\b")


class PosleakDocstrings(griffe.Extension):
    """Public names lead to what is called, and docstrings become Markdown."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Put functions where users find them, before anything is rendered."""
        called = {name: _function(pkg[name], name) for name in map(str, pkg.exports or ())}
        for name, function in called.items():
            if function is not None:
                pkg.set_member(name, _moved(function, name, pkg, loader))

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Write its docstring as Markdown."""
        if obj.docstring is not None:
            text, lines = described(obj.docstring.value)
            types = _fields(obj) if isinstance(obj, griffe.Class) else {}
            obj.docstring.value = _PAGE.sub(r"[docs/\1.md](\1.md)", "\n".join([text, "", *_table(lines, types)]))


def described(docstring: str) -> tuple[str, dict[str, str]]:
    """The sentences of a docstring, and what its aligned lines say, by name.

    `a   is this;  b: is that` is about two names.
    """
    sentences, lines, last = list[str](), dict[str, str](), ""
    for line in inspect.cleandoc(docstring).splitlines():
        if found := _ALIGNED.fullmatch(line):
            last = found[1]
            lines[last] = found[2]
        elif last and line.startswith("  "):
            lines[last] += f" {line.strip()}"
        else:
            sentences.append(line)
            last = ""
    return "\n".join(sentences).strip(), dict(_apart(lines))


def _apart(lines: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, text in lines.items():
        first, *others = _ALSO.split(text)
        yield name, first
        yield from zip(others[::2], others[1::2])


def _table(lines: Mapping[str, str], types: Mapping[str, str]) -> Iterator[str]:
    """Names, their types and what is said: fields in their order, then what else has a line. No column is empty."""
    names = [*types, *(name for name in lines if name not in types)]
    said = {name: text.replace("|", "\\|") for name, text in lines.items()}
    columns = [column for column in (_code({name: name for name in names}), _code(types), said) if column]
    if columns:
        yield _row("" for _ in columns)
        yield _row("---" for _ in columns)
        yield from (_row(column.get(name, "") for column in columns) for name in names)


def _code(texts: Mapping[str, str]) -> dict[str, str]:
    return {name: f"`{text}`" for name, text in texts.items()}


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _fields(kind: griffe.Class) -> dict[str, str]:
    """Public fields with their types, inherited ones first."""
    members = {name: each for name, each in kind.all_members.items() if not name.startswith("_")}
    found = {name: each.final_target if isinstance(each, griffe.Alias) else each for name, each in members.items()}
    return {
        name: str(each.annotation)
        for name, each in found.items()
        if isinstance(each, griffe.Attribute) and each.annotation is not None and "property" not in each.labels
    }


def _function(found: griffe.Object | griffe.Alias, name: str) -> griffe.Function | None:
    """The function that a public name is; a module that hides its function is griffe's way to read the code."""
    final = found.final_target if isinstance(found, griffe.Alias) else found
    if isinstance(final, griffe.Module):
        return _function(final[name], name)
    return final if isinstance(final, griffe.Function) else None


def _moved(function: griffe.Function, name: str, pkg: griffe.Module, loader: griffe.GriffeLoader) -> griffe.Function:
    """The function under its public name. It keeps the members of a package that has the same name."""
    for parameter in function.parameters:
        if isinstance(parameter.default, griffe.ExprName):
            parameter.default = _constant(parameter.default.canonical_path, loader)
    public = griffe.Function(
        name, parameters=function.parameters, returns=function.returns, docstring=function.docstring, parent=pkg
    )
    if isinstance(package := pkg.members.get(name), griffe.Module):
        public.members = package.members
    return public


def _constant(path: str, loader: griffe.GriffeLoader) -> str:
    """As it is written in the code; where several are written in one line, griffe cannot tell, and it is imported."""
    try:
        return str(loader.modules_collection[path].value)
    except KeyError:
        module, _, name = path.rpartition(".")
        return repr(getattr(import_module(module), name))
