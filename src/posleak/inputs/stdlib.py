"""English prose that every Python has: the documentation strings of its standard library.

Sources are parsed, never imported. The same Python version has the same text, unless a distribution leaves some files
out; the hash in the result shows whether two texts are the same.
"""

from __future__ import annotations

import ast
import os
import platform
import sysconfig
import threading
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from posleak.errors import InputError

EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"})
"""Folders that are not the library: what was installed into it, its tests, and files broken on purpose."""

_filters = threading.Lock()
"""Python's filters of warnings are shared by all threads."""

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def standard_library_text(most: int | None = None) -> tuple[str, str]:
    """(Python version, text): docstrings by file and then in source order, cleaned, joined by blank lines.

    most: stop after the file in which so many characters are reached; a part is read in a fraction of the time.
    """
    root, found, length = Path(sysconfig.get_paths()["stdlib"]), list[str](), 0
    for file in library_files(root):
        if most is not None and length >= most:
            break
        found += (texts := list(file_docstrings(file)))
        length += sum(map(len, texts))
    text = "\n\n".join(found)
    if not text:
        raise InputError(
            "this Python has no sources of its standard library",
            where="inputs",
            got="no docstrings found",
            expected=".py files with docstrings",
            remedy="use text:PATH with a text of your own, or random",
        )
    return platform.python_version(), text


def library_files(root: Path) -> list[Path]:
    """The .py files below `root` that belong to the library, sorted by relative path."""
    found = list[str]()
    for folder, inner, files in os.walk(root):
        inner[:] = [
            name for name in inner if name not in EXCLUDED_FOLDERS
        ]  # what is installed below it is many times as much
        found += [(Path(folder) / name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return [root / name for name in sorted(found)]


def file_docstrings(file: Path) -> Iterator[str]:
    """Docstrings of one source file; nothing for a file that is not valid Python (templates, other versions)."""
    try:
        with _filters, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in somebody else's source
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError):  # ValueError: null bytes; UnicodeDecodeError is one too
        return
    yield from docstrings(tree)


def docstrings(node: ast.AST) -> Iterator[str]:
    """Docstrings of `node` and what is defined inside it, in source order, also under `if` and `try`."""
    if isinstance(node, _DOCUMENTED) and (text := ast.get_docstring(node)):
        yield text
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            yield from docstrings(child)
