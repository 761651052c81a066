"""A console that shows text as it is: no markup in it is obeyed, and no control character reaches the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from posleak.show.streams import ERR, OUT, writing_to
from posleak.text import visible


class PlainConsole(Console):
    """Strings are literal, since they may hold names and messages of strangers; styles are given as rich's Text."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What rich would write, with control characters spelled out, but for the codes of rich itself."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def print(self, *objects: Any, **settings: Any) -> None:
        with writing_to(ERR if self.stderr else OUT):
            super().print(*objects, **settings)

    def on_broken_pipe(self) -> None:
        """Left to the command's net; rich would end the process with status 1, which means that a check failed."""
        raise  # the BrokenPipeError that rich is handling
