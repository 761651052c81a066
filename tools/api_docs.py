"""The griffe extension with which mkdocstrings generates docs/api.md from docstrings.

It converts aligned descriptions of parameters and fields (`name   text`) into tables, puts functions under their public
names, and replaces constants in defaults by their values.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any

import griffe

_ALIGNED = re.compile(r"([\w*]+(?:, [\w*]+)*) {2,}(\S.*)")
_NEXT_NAME = re.compile(r"; {2,}([\w, ]+): ")
_PAGE = re.compile(r"(?<!\[)\bdocs/(\w+)\.md\b")


class PosleakDocstrings(griffe.Extension):
    """Puts functions under their public names and converts docstrings to Markdown."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Put functions under their public names before anything is rendered."""
        functions = {name: _function(pkg[name], name) for name in map(str, pkg.exports or ())}
        for name, function in functions.items():
            if function is not None:
                pkg.set_member(name, _public_function(function, name, pkg, loader))

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        """Convert a docstring to Markdown."""
        if obj.docstring is not None:
            text, lines = parse_docstring(obj.docstring.value)
            types = _fields(obj) if isinstance(obj, griffe.Class) else {}
            obj.docstring.value = _PAGE.sub(r"[docs/\1.md](\1.md)", "\n".join([text, "", *_table(lines, types)]))


def parse_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """Return the sentences of a docstring, and the descriptions in its aligned lines by name.

    `a   is this;  b: is that` describes two names.
    """
    sentences, lines, last = list[str](), dict[str, str](), ""
    for line in inspect.cleandoc(docstring).splitlines():
        if match := _ALIGNED.fullmatch(line):
            last = match[1]
            lines[last] = match[2]
        elif last and line.startswith("  "):
            lines[last] += f" {line.strip()}"
        else:
            sentences.append(line)
            last = ""
    return "\n".join(sentences).strip(), dict(_split_names(lines))


def _split_names(lines: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield name and description of every name; a line may describe several."""
    for name, text in lines.items():
        first, *others = _NEXT_NAME.split(text)
        yield name, first
        yield from zip(others[::2], others[1::2])


def _table(lines: Mapping[str, str], types: Mapping[str, str]) -> Iterator[str]:
    """Yield a table of names, types and descriptions: fields first, then other names; empty columns are omitted."""
    names = [*types, *(name for name in lines if name not in types)]
    descriptions = {name: text.replace("|", "\\|") for name, text in lines.items()}
    columns = [column for column in (_code({name: name for name in names}), _code(types), descriptions) if column]
    if columns:
        yield _row("" for _ in columns)
        yield _row("---" for _ in columns)
        yield from (_row(column.get(name, "") for column in columns) for name in names)


def _code(texts: Mapping[str, str]) -> dict[str, str]:
    return {name: f"`{text}`" for name, text in texts.items()}


def _row(cells: Iterable[str]) -> str:
    """Return a row of a table. Pipes are not escaped: types contain them, as code."""
    return f"| {' | '.join(cells)} |"


def _fields(kind: griffe.Class) -> dict[str, str]:
    """Return the public fields with their types, inherited ones first."""
    members = {name: each for name, each in kind.all_members.items() if not name.startswith("_")}
    resolved = {name: each.final_target if isinstance(each, griffe.Alias) else each for name, each in members.items()}
    return {
        name: str(each.annotation)
        for name, each in resolved.items()
        if isinstance(each, griffe.Attribute) and each.annotation is not None and "property" not in each.labels
    }


def _function(member: griffe.Object | griffe.Alias, name: str) -> griffe.Function | None:
    """Return the function of a public name, None if it is something else. `member` may be a module of that name."""
    final = member.final_target if isinstance(member, griffe.Alias) else member
    if isinstance(final, griffe.Module):
        return _function(final[name], name)
    return final if isinstance(final, griffe.Function) else None


def _public_function(
    function: griffe.Function, name: str, pkg: griffe.Module, loader: griffe.GriffeLoader
) -> griffe.Function:
    """Return the function under its public name, with the members of a package of the same name."""
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
    """Return the value of a constant as text; import it if griffe cannot resolve it."""
    try:
        return str(loader.modules_collection[path].value)
    except KeyError:
        module, _, name = path.rpartition(".")
        return repr(getattr(import_module(module), name))
