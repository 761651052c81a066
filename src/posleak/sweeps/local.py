"""The engine on one machine: one cell after another, in a worker process that is replaced when it dies.

A cell that takes its process with it (out of memory, a crash in a library) costs nothing but itself. Driver and worker
talk in lines of JSON over the worker's standard input and output; a worker whose driver is gone ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import IO

from posleak.typed import from_json, plain

from .board import Board
from .cells import Cell
from .storage import Storage
from .work import Outcome, Worker, keep_failure

PAUSE = 2.0
"""Seconds before a cell that somebody else is at is looked at again."""

GRACE = 10.0
"""Seconds that a worker has to end by itself."""

LAST_WORDS = 2000
"""Bytes of what a worker that died wrote on standard error."""


@dataclass(frozen=True)
class Settings:
    """How cells are done, whatever the engine: see `Worker`. `retries`: how often a cell whose worker died is tried
    again."""

    again: bool = False
    retries: int = 2
    max_memory: int | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False
    verify: bool = False

    def worker(self, storage: Storage, threads: int | None) -> Worker:
        return Worker(
            storage, self.again, threads, self.max_memory, self.trust_remote_code, self.allow_pickle, self.verify
        )


@dataclass(frozen=True)
class Order:
    """What a worker is told: a cell, its id at the driver's, and how many workers have begun it."""

    cell: Cell
    id: str
    attempt: int


@dataclass(frozen=True)
class Message:
    """What a worker says: what it does now, or how the cell ended."""

    said: str | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Local:
    """Cells one after the other, on this machine."""

    settings: Settings = Settings()

    def run(self, storage: Storage, board: Board) -> None:
        """Do every open cell, model by model. Cells that another sweep is at come last, until it has finished or given
        up."""
        attempts = dict[str, int]()
        while cells := sorted(board.open, key=lambda cell: tuple(map(str, cell.group))):
            free = [cell for cell in cells if not storage.is_held(cell.folder)]
            board.elsewhere = len(cells) - len(free)
            for threads, several in groupby(free, key=_threads):
                self._several(list(several), threads, storage, board, attempts)
            board.show()
            if not free:
                time.sleep(PAUSE)

    def _several(
        self, cells: list[Cell], threads: int | None, storage: Storage, board: Board, attempts: dict[str, int]
    ) -> None:  # fmt: skip
        """Cells in one process, or several if it dies. Those that somebody else has begun meanwhile stay open."""
        waiting = deque(cells)
        while waiting:
            with _process(self.settings, storage, threads) as process:
                while waiting:
                    cell = waiting[0]
                    attempts[cell.id] = attempts.get(cell.id, 0) + 1
                    board.started(cell)
                    outcome = process.do(Order(cell, cell.id, attempts[cell.id]), board)
                    if outcome is None and attempts[cell.id] <= self.settings.retries:
                        board.stopped(cell)
                        break  # the worker died: the same cell again, in a new process
                    waiting.popleft()
                    if outcome is None:
                        board.ended(died(storage, cell, attempts[cell.id], process.last_words))
                        break
                    if outcome.busy:
                        attempts[cell.id] -= 1
                        board.stopped(cell)
                    else:
                        board.ended(outcome)


def _threads(cell: Cell) -> int | None:
    """Of torch, in the process that does this cell."""
    return None if cell.resources.cpus is None else max(1, int(cell.resources.cpus))


def died(storage: Storage, cell: Cell, attempts: int, how: str) -> Outcome:
    """Keep the failure of a cell whose workers died."""
    times = "once" if attempts == 1 else f"{attempts} times"
    what = (
        f"its worker died {times} without a word ({how}); it may have run out of memory: use a shorter length or a "
        "smaller batch"
    )
    return keep_failure(storage, cell, what, None, attempts)


# -- the driver's side -----------------------------------------------------------------------------------------------


@dataclass
class _Process:
    """A worker process, seen from the driver."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def do(self, order: Order, board: Board) -> Outcome | None:
        """How the cell ended; None if the worker died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(plain(order)).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        for line in self.process.stdout:
            message = from_json(Message, line)
            if message.outcome is not None:
                return message.outcome
            board.started(order.cell, message.said or "")
        return None

    @property
    def last_words(self) -> str:
        """How the process ended, and what it said last."""
        status = self.process.wait()
        self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, self.errors.tell() - LAST_WORDS))
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"{how}: {lines[-1]}" if lines else how


@contextmanager
def _process(settings: Settings, storage: Storage, threads: int | None) -> Iterator[_Process]:
    """A worker process, which is gone afterwards, whatever happens."""
    asked = {"storage": storage.everywhere, "threads": threads, "settings": settings}
    environment = dict(os.environ) | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "posleak.sweeps.local", json.dumps(plain(asked))], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=errors, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            yield _Process(process, errors)
        except BaseException:  # Ctrl-C: what it has finished is on disk
            process.kill()
            raise
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


# -- the worker's side -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    storage: Storage
    threads: int | None
    settings: Settings


def serve(asked: str) -> None:
    """Do the cells that come in on standard input, until it ends."""
    told = from_json(_Asked, asked)
    lines, orders = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)  # whatever libraries print goes where errors go
    worker = told.settings.worker(told.storage, told.threads)

    def say(message: Message) -> None:
        lines.write(json.dumps(plain(message)).encode() + b"\n")
        lines.flush()

    for line in _lines(orders):
        order = from_json(Order, line)
        outcome = worker.run(order.cell, order.attempt, lambda what: say(Message(said=what)), order.id)
        say(Message(outcome=outcome))


def _lines(orders: IO[bytes]) -> Iterator[bytes]:
    """Lines as they come. They are waited for in a thread, so that a worker whose driver is gone ends at once."""
    from queue import SimpleQueue

    found: SimpleQueue[bytes] = SimpleQueue()

    def listen() -> None:
        for line in orders:
            found.put(line)
        os._exit(0)  # the driver is gone, or has no more cells: nothing here is worth waiting for

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield found.get()


if __name__ == "__main__":
    try:
        serve(sys.argv[1])
    except BrokenPipeError:  # the driver is gone
        os._exit(1)
