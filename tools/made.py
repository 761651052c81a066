"""Generated parts of pages, between the markers `<!-- made: NAME -->` and `<!-- end: NAME -->`."""

from __future__ import annotations

import re

from posleak.errors import InputError


def row(*cells: str) -> str:
    """Return a row of a Markdown table, with pipes in cells escaped."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def replaced(text: str, name: str, made: str) -> str:
    """Return the page with the text between the markers of this name replaced."""
    pattern = rf"(<!-- made: {name} -->\n).*?(<!-- end: {name} -->)"
    if not re.search(pattern, text, flags=re.S):
        raise InputError("the page has no such markers", where=f"<!-- made: {name} -->",
                         remedy=f"add <!-- made: {name} --> and <!-- end: {name} --> to the page")  # fmt: skip
    return re.sub(pattern, lambda match: f"{match[1]}\n{made}\n\n{match[2]}", text, count=1, flags=re.S)


def part(text: str, name: str) -> str:
    """Return the text between the markers."""
    return text.partition(f"<!-- made: {name} -->\n")[2].partition(f"<!-- end: {name} -->")[0].strip("\n")
