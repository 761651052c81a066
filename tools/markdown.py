"""Markdown of generated pages: tables, and parts between `<!-- made: NAME -->` and `<!-- end: NAME -->`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from posleak.errors import InputError


def row(*cells: str) -> str:
    """Return a row of a table. Pipes are escaped, newlines become spaces."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in cells)} |"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [row(*header), "|" + "---|" * len(header), *(row(*cells) for cells in rows)]


def replace_part(page: str, name: str, text: str) -> str:
    """Return the page with the text between the markers of this name replaced."""
    pattern = rf"(<!-- made: {name} -->\n).*?(<!-- end: {name} -->)"
    if not re.search(pattern, page, flags=re.S):
        raise InputError("the page has no such markers", where=f"<!-- made: {name} -->",
                         remedy=f"add <!-- made: {name} --> and <!-- end: {name} --> to the page")  # fmt: skip
    return re.sub(pattern, lambda match: f"{match[1]}\n{text}\n\n{match[2]}", page, count=1, flags=re.S)


def read_part(page: str, name: str) -> str:
    """Return the text between the markers of this name."""
    return page.partition(f"<!-- made: {name} -->\n")[2].partition(f"<!-- end: {name} -->")[0].strip("\n")
