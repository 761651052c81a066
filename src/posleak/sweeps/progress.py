"""The progress of a sweep: which cells are finished, running or failed, and how long the rest may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from .cells import Cell
from .state import CellStatus, State
from .work import Outcome


@dataclass(frozen=True)
class SweepProgress:
    """The counts of a sweep's cells at one moment.

    running     description of a cell -> what is done in it now
    elsewhere   cells that another sweep is working on
    left        estimated seconds; None if unknown
    """

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
        return ", ".join([f"{self.finished} of {self.total} cells finished", *(f"{n} {what}" for n, what in more if n)])


OnSweepProgress = Callable[[SweepProgress], None]


@dataclass
class Tracker:
    """The cells of a sweep and how each ended. Engines report to it; the callback receives every change.

    retry_failed   treat cells that failed before as open
    """

    statuses: list[CellStatus]
    callback: OnSweepProgress = lambda progress: None
    retry_failed: bool = False
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    running: dict[str, str] = field(default_factory=dict)
    elsewhere: int = 0
    _started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.cells = {status.cell.id: status.cell for status in self.statuses}
        settled = [State.finished, State.left_out, *([] if self.retry_failed else [State.failed])]
        self.before = {status.cell.id: status.state for status in self.statuses if status.state in settled}

    @property
    def open(self) -> list[Cell]:
        """The cells that are to be measured, in the order of the manifest."""
        return [cell for cell in self.cells.values() if cell.id not in self.before and cell.id not in self.outcomes]

    def started(self, cell: Cell, what: str = "starting") -> None:
        """Report that a cell is being measured, and what is done in it now."""
        self.running[cell.id] = what
        self.show()

    def stopped(self, cell: Cell) -> None:
        """Report that a cell is no longer being measured, and is still open."""
        self.running.pop(cell.id, None)
        self.show()

    def ended(self, outcome: Outcome) -> None:
        """Report how a cell ended."""
        self.running.pop(outcome.id, None)
        self.outcomes[outcome.id] = outcome
        self.show()

    def show(self) -> None:
        """Call the callback."""
        states = [*self.before.values(), *(outcome.state for outcome in self.outcomes.values())]
        progress = SweepProgress(
            total=len(self.cells), finished=states.count(State.finished), failed=states.count(State.failed),
            left_out=states.count(State.left_out), unwritten=states.count(None),
            running={self.cells[cell].details: what for cell, what in self.running.items()},
            elsewhere=self.elsewhere, left=self._left(),
        )  # fmt: skip
        self.callback(progress)

    def _left(self) -> float | None:
        """Estimated by tokens: models of one sweep are similar."""
        done = sum(self.cells[outcome.id].work for outcome in self.outcomes.values() if not outcome.reused)
        rest = sum(cell.work for cell in self.open)
        return (time.monotonic() - self._started) * rest / done if done else None
