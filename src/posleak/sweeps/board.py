"""How far a sweep is: which cells are finished, running, failed; and how long the rest may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .cells import Cell
from .state import Known, State
from .work import Outcome


@dataclass(frozen=True)
class Reached:
    """A look at the board. `running`: cells and what is done of them now, in words; `elsewhere`: cells that another
    sweep is at; `left`: seconds, None if nothing is known yet."""

    total: int
    finished: int
    failed: int
    left_out: int
    unwritten: int
    running: dict[str, str]
    elsewhere: int
    left: float | None

    @property
    def done(self) -> int:
        return self.finished + self.failed + self.left_out + self.unwritten

    @property
    def text(self) -> str:
        """`12 of 24 cells finished, 2 running, 1 failed`"""
        more = [(len(self.running), "running"), (self.failed, "failed"), (self.left_out, "left out")]
        more += [(self.unwritten, "not written"), (self.elsewhere, "left to another sweep")]
        parts = [f"{self.finished} of {self.total} cells finished", *(f"{n} {what}" for n, what in more if n)]
        return ", ".join(parts)


Watch = Callable[[Reached], None]


@dataclass
class Board:
    """Cells of a sweep and how each ended. Engines tell it what happens; whoever watches is told of every change."""

    known: list[Known]
    watch: Watch = lambda reached: None
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    running: dict[str, str] = field(default_factory=dict)
    elsewhere: int = 0
    _begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.cells = {each.cell.id: each.cell for each in self.known}
        settled = (State.finished, State.failed, State.left_out)
        self.before = {each.cell.id: each.state for each in self.known if each.state in settled}

    def retry(self, states: Iterable[State]) -> None:
        """Take cells in these states as open."""
        self.before = {cell: state for cell, state in self.before.items() if state not in set(states)}

    @property
    def open(self) -> list[Cell]:
        """What is to be done, in the order of the manifest."""
        return [cell for cell in self.cells.values() if cell.id not in self.before and cell.id not in self.outcomes]

    def started(self, cell: Cell, what: str = "starting") -> None:
        self.running[cell.id] = what
        self.show()

    def stopped(self, cell: Cell) -> None:
        """Nobody is at it any more, and it is not done."""
        self.running.pop(cell.id, None)
        self.show()

    def ended(self, outcome: Outcome) -> None:
        self.running.pop(outcome.id, None)
        self.outcomes[outcome.id] = outcome
        self.show()

    def show(self) -> None:
        self.watch(self.reached)

    @property
    def reached(self) -> Reached:
        states = [*self.before.values(), *(outcome.state for outcome in self.outcomes.values())]
        running = {self.cells[cell].details: what for cell, what in self.running.items()}
        return Reached(
            total=len(self.cells), finished=states.count(State.finished), failed=states.count(State.failed),
            left_out=states.count(State.left_out), unwritten=states.count(None), running=running,
            elsewhere=self.elsewhere, left=self._left(),
        )  # fmt: skip

    def _left(self) -> float | None:
        """By the work that was done since the beginning: tokens, for cells of one sweep are of similar models."""
        done = sum(self.cells[each.id].work for each in self.outcomes.values() if not each.reused)
        if not done:
            return None
        rest = sum(cell.work for cell in self.open)
        return (time.monotonic() - self._begun) * rest / done
