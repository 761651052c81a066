"""The engines on one machine: one cell after another, in a worker process, or in this process for models in memory.

A worker process that dies (out of memory, a crash in a library) is replaced, and its cell started again. Driver and
worker exchange lines of JSON over the worker's standard input and output; a worker whose driver is gone ends.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from queue import SimpleQueue
from typing import IO, Any

from posleak.typed import from_json, plain

from .cells import Cell
from .progress import Tracker
from .storage import Storage
from .work import Outcome, Worker, worker_died

PAUSE = 2.0
"""Seconds before a cell that another sweep has is checked again."""

GRACE = 10.0
"""Seconds before a worker process that does not end is killed."""

STDERR_BYTES = 2000
"""How much of a dead worker's standard error is read."""


@dataclass(frozen=True)
class WorkOrder:
    """A message to a worker: a cell, its id in the driver's process, and the number of workers that have started it."""

    cell: Cell
    id: str
    attempt: int


@dataclass(frozen=True)
class Message:
    """A message from a worker: a status line, or how the cell ended."""

    status: str | None = None
    outcome: Outcome | None = None


@dataclass(frozen=True)
class InMemory:
    """Cells in this process, with models that are in memory. `subjects`: by the name of the model in the cells."""

    subjects: Mapping[str, Any]
    worker: Worker

    def run(self, storage: Storage, tracker: Tracker) -> None:
        for cell in tracker.open:
            tracker.started(cell)
            if cell.model in self.subjects:
                self.worker.hold(cell, self.subjects[cell.model])
            tracker.ended(self.worker.run(storage, cell, on_status=partial(tracker.started, cell)))


@dataclass(frozen=True)
class Local:
    """Cells one after another, in a worker process on this machine."""

    worker: Worker

    def run(self, storage: Storage, tracker: Tracker) -> None:
        """Measure every open cell, model by model; cells that another sweep has come last, once it releases them."""
        attempts = dict[str, int]()
        while cells := sorted(tracker.open, key=lambda cell: tuple(map(str, cell.group))):
            free = [cell for cell in cells if not storage.is_locked(cell.folder)]
            tracker.elsewhere = len(cells) - len(free)
            for threads, group in groupby(free, key=_threads):
                self._run_group(deque(group), replace(self.worker, threads=threads), storage, tracker, attempts)
            tracker.show()
            if not free:
                time.sleep(PAUSE)

    def _run_group(
        self, waiting: deque[Cell], worker: Worker, storage: Storage, tracker: Tracker, attempts: dict[str, int]
    ) -> None:
        """Measure cells in one process, and in a new one whenever it dies. Cells that another sweep took stay open."""
        while waiting:
            with _worker_process(worker, storage) as process:
                while waiting:
                    cell = waiting[0]
                    attempts[cell.id] = attempts.get(cell.id, 0) + 1
                    tracker.started(cell)
                    outcome = process.measure(WorkOrder(cell, cell.id, attempts[cell.id]), tracker)
                    if outcome is None and attempts[cell.id] <= worker.retries:
                        tracker.stopped(cell)
                        break  # the worker died: the same cell again, in a new process
                    waiting.popleft()
                    if outcome is None:
                        tracker.ended(worker_died(storage, cell, attempts[cell.id], process.how_it_ended))
                        break
                    if outcome.busy:
                        attempts[cell.id] -= 1
                        tracker.stopped(cell)
                    else:
                        tracker.ended(outcome)


def _threads(cell: Cell) -> int | None:
    return None if cell.resources.cpus is None else max(1, int(cell.resources.cpus))


# -- the driver --------------------------------------------------------------------------------------------------------


@dataclass
class _Process:
    """A worker process as the driver sees it."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def measure(self, order: WorkOrder, tracker: Tracker) -> Outcome | None:
        """Return how the cell ended; None if the worker died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(_line(order))
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        for line in self.process.stdout:
            message = from_json(Message, line)
            if message.outcome is not None:
                return message.outcome
            tracker.started(order.cell, message.status or "")
        return None

    @property
    def how_it_ended(self) -> str:
        """The exit status or signal, and the last line of standard error."""
        status = self.process.wait()
        self.errors.seek(0, os.SEEK_END)
        self.errors.seek(max(0, self.errors.tell() - STDERR_BYTES))
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"{how}: {lines[-1]}" if lines else how


@contextmanager
def _worker_process(worker: Worker, storage: Storage) -> Iterator[_Process]:
    """Start a worker process, and end it afterwards."""
    task = json.dumps(plain({"storage": storage.absolute, "worker": worker}))
    environment = dict(os.environ) | ({} if worker.threads is None else {"OMP_NUM_THREADS": str(worker.threads)})
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "posleak.sweeps.local", task], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            yield _Process(process, errors)
        except BaseException:  # Ctrl-C: what the worker has finished is on disk
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


# -- the worker process ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    storage: Storage
    worker: Worker


def serve(argument: str) -> None:
    """Measure the cells that arrive on standard input, until it ends."""
    task = from_json(_Task, argument)
    answers, orders = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)  # what libraries print goes to standard error

    def answer(message: Message) -> None:
        answers.write(_line(message))
        answers.flush()

    for line in _lines(orders):
        order = from_json(WorkOrder, line)
        outcome = task.worker.run(
            task.storage, order.cell, order.attempt, lambda status: answer(Message(status)), order.id
        )
        answer(Message(outcome=outcome))


def _line(message: Any) -> bytes:
    return json.dumps(plain(message)).encode() + b"\n"


def _lines(orders: IO[bytes]) -> Iterator[bytes]:
    """Yield lines as they arrive. A thread reads them, so that a worker whose driver is gone ends at once."""
    queue: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        for line in orders:
            queue.put(line)
        os._exit(0)  # the driver is gone or has no more cells

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield queue.get()


if __name__ == "__main__":
    try:
        serve(sys.argv[1])
    except BrokenPipeError:  # the driver is gone
        os._exit(1)
