"""A console that prints text literally, and line breaking that keeps a number with its name, unit and interval."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.text import Text

from posleak.show.streams import ERR, OUT, writing_to
from posleak.text import visible

UNITS = {"nats", "nats²", "tokens", "token", "prompts", "prompt", "times", "MB", "GB", "kB", "TB", "s", "positions"}

_WORD = re.compile(r"\S+")
_NUMBER = re.compile(r"[×+−-]?\.?\d")
_INTERVAL = re.compile(r"\([×+−-]?\.?\d[^()\n]*[…–][^()\n]*\)")
_BETWEEN = ("…", "→", "<", ">", "≤", "−")
_SEAM = re.compile(r"[/\\_=:](?=.)|-(?=\D)")
"""Characters after which a long word may be broken."""

Span = tuple[int, int]


class PlainConsole(Console):
    """A rich console for untrusted text, such as model names; use rich's Text for styles."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield rich's segments with control characters escaped, except for rich's own control codes."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def print(self, *objects: Any, **settings: Any) -> None:
        with writing_to(ERR if self.stderr else OUT):
            super().print(*objects, **settings)

    def on_broken_pipe(self) -> None:
        """Re-raise BrokenPipeError; rich would exit with status 1, which means a failed check."""
        raise  # the BrokenPipeError that rich is handling


@dataclass(frozen=True)
class Prose:
    """Text that wraps to the width of the console; continuation lines are indented by `indent` spaces."""

    text: Text
    indent: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from broken(self.text, options.max_width, self.indent)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(longest_piece(self.text.plain), longest_line(self.text.plain))


def prose(text: str | Text, style: str = "", indent: int = 0) -> Prose:
    return Prose(text if isinstance(text, Text) else Text(text, style=style), indent)


def longest_line(text: str) -> int:
    return max(map(cell_len, text.split("\n")), default=0)


def longest_piece(text: str) -> int:
    """Return the width of the longest unbreakable piece."""
    return max((cell_len(text[a:b]) for line in _paragraphs(text) for a, b in _pieces(text, *line)), default=0)


def broken(text: Text, width: int, indent: int = 0) -> list[Text]:
    """Return the lines of a text; pieces that are too long are broken at spaces, long words at seams."""
    text = text.copy()
    text.expand_tabs(8)
    lines = list[Text]()
    for start, end in _paragraphs(text.plain):
        for number, (a, b) in enumerate(_lines(text.plain, start, end, max(width, 1), min(indent, width // 2))):
            line = Text(" " * min(indent, width // 2) if number else "", style=text.style)
            lines.append(line.append_text(text[a:b]))
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"  # "ignore" would disable alignment; no line is too long
    return lines


def _paragraphs(text: str) -> Iterator[Span]:
    at = 0
    for line in text.split("\n"):
        yield at, at + len(line)
        at += len(line) + 1


def _lines(text: str, start: int, end: int, width: int, indent: int) -> Iterator[Span]:
    """Yield the spans of the lines, without the spaces at breaks."""
    begin, last = start, start
    for a, b in _fitting(text, _pieces(text, start, end), width - indent):
        room = width if begin == start else width - indent
        if last > begin and cell_len(text[begin:b]) > room:
            yield begin, last
            begin = a
        last = b
    yield begin, last


def _fitting(text: str, pieces: list[Span], width: int) -> Iterator[Span]:
    """Yield pieces that fit the width: too wide ones are cut into words, and words into fragments."""
    for a, b in pieces:
        if cell_len(text[a:b]) <= width:
            yield a, b
            continue
        for word in _WORD.finditer(text, a, b):
            yield from _cut(text, word.start(), word.end(), max(width, 1))


def _cut(text: str, start: int, end: int, width: int) -> Iterator[Span]:
    while cell_len(text[start:end]) > width:
        most = start + 1
        while most < end and cell_len(text[start : most + 1]) <= width:
            most += 1
        seams = [seam.end() for seam in _SEAM.finditer(text, start, end) if seam.end() <= most]
        at = seams[-1] if seams else most
        yield start, at
        start = at
    yield start, end


def _pieces(text: str, start: int, end: int) -> list[Span]:
    """Return the spans of the words of one line; words that must not be separated form one piece."""
    pieces, before, closed = list[Span](), "", start
    for word in _WORD.finditer(text, start, end):
        interval = _INTERVAL.match(text, word.start(), end)
        if pieces and (word.start() < closed or _together(before, word[0], interval is not None)):
            pieces[-1] = (pieces[-1][0], word.end())
        else:
            pieces.append(word.span())
        before, closed = word[0], interval.end() if interval else closed
    return pieces


def _together(one: str, other: str, interval: bool) -> bool:
    """Return whether two words must stay together: name and number, number and interval or unit, ends of a range."""
    number = one[-1] in "0123456789%" and _NUMBER.match(one) is not None
    if _NUMBER.match(other):
        return one in _BETWEEN or (not number and (one[-1].isalnum() or one[-1] == ":"))
    return number and (interval or other in _BETWEEN or other.rstrip(".,;:)") in UNITS)
