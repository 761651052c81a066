"""A console that prints text literally: markup is ignored, and control characters are escaped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from posleak.show.streams import ERR, OUT, writing_to
from posleak.text import visible


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
