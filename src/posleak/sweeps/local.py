"""The engines on one machine: one cell after another, in a worker process, or in this process for models in memory.

A worker process that dies (out of memory, a crash in a library) is replaced, and its cell is restarted. Driver and
worker exchange lines of JSON over the worker's standard input and output: a cell, then status lines and the outcome. A
worker ends when its driver is gone.
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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from queue import SimpleQueue
from typing import IO, Any, NamedTuple

from posleak.typed import from_json, plain

from .cells import Cell
from .state import Outcome, Tracker
from .storage import Storage
from .work import Worker, worker_died

PAUSE = 2.0
"""Seconds before a cell that another sweep has is checked again."""

GRACE = 10.0
"""Seconds before a worker process that does not end is killed."""

STDERR_BYTES = 2000
"""How much of a dead worker's standard error is read."""


class Order(NamedTuple):
    """Message to a worker: a cell, the number of workers that have started it, and its id in the driver's process."""

    cell: Cell
    attempt: int
    id: str


@dataclass(frozen=True)
class InMemory:
    """Engine in this process, for models in memory. `subjects`: by the name of the model in the cells."""

    subjects: Mapping[str, Any]
    worker: Worker

    def run(self, storage: Storage, tracker: Tracker) -> None:
        """Measure every open cell, in the order of the manifest."""
        for cell in tracker.open:
            tracker.attempt(cell)
            if cell.model in self.subjects:
                self.worker.hold(cell, self.subjects[cell.model])
            tracker.ended(self.worker.run(storage, cell, on_status=partial(tracker.started, cell)))


@dataclass(frozen=True)
class Local:
    """Engine on this machine: one cell after another, in a worker process."""

    worker: Worker

    def run(self, storage: Storage, tracker: Tracker) -> None:
        """Measure every open cell, model by model."""
        for free in rounds(storage, tracker):
            free.sort(key=lambda cell: tuple(map(str, cell.group)))
            for cpus, group in groupby(free, key=lambda cell: cell.resources.cpus):
                worker = replace(self.worker, threads=None if cpus is None else max(1, int(cpus)))
                self._run_group(deque(group), worker, storage, tracker)

    def _run_group(self, waiting: deque[Cell], worker: Worker, storage: Storage, tracker: Tracker) -> None:
        """Measure cells in one process, and in a new one whenever it dies. Cells that another sweep took stay open."""
        while waiting:
            with _worker_process(worker, storage) as process:
                while waiting:
                    cell = waiting.popleft()
                    if (outcome := process.measure(cell, tracker)) is None:
                        if worker_died(storage, tracker, cell, process.how_it_ended, worker.retries):
                            waiting.appendleft(cell)  # the same cell again, in a new process
                        break
                    tracker.ended(outcome)


def rounds(storage: Storage, tracker: Tracker) -> Iterator[list[Cell]]:
    """Yield the open cells that no other sweep has, until none is open.

    Cells that another sweep has come in a later round, once it releases them.
    """
    while cells := tracker.open:
        free = [cell for cell in cells if not storage.is_locked(cell.path)]
        tracker.elsewhere = len(cells) - len(free)
        tracker.show()
        yield free
        if len(tracker.open) == len(cells):
            time.sleep(PAUSE)


# -- the driver --------------------------------------------------------------------------------------------------------


@dataclass
class _Process:
    """The driver's view of a worker process."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def measure(self, cell: Cell, tracker: Tracker) -> Outcome | None:
        """Send a cell to the worker, and return how it ended; None if the worker died."""
        orders, answers = self.process.stdin, self.process.stdout
        assert orders is not None
        assert answers is not None
        try:
            _send(orders, Order(cell, tracker.attempt(cell), cell.id))
        except BrokenPipeError:
            return None
        for line in answers:
            if not isinstance(status := json.loads(line), str):
                return from_json(Outcome, line)
            tracker.started(cell, status)
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
    command = [sys.executable, "-m", __name__, storage.absolute.root, json.dumps(plain(worker))]
    environment = dict(os.environ) | ({} if worker.threads is None else {"OMP_NUM_THREADS": str(worker.threads)})
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield _Process(process, errors)
        except BaseException:  # Ctrl-C: what the worker has finished is on disk
            process.kill()
            raise
        finally:
            try:
                process.communicate(timeout=GRACE)  # closes its standard input, which ends it
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


# -- the worker process ------------------------------------------------------------------------------------------------


def serve(root: str, options: str) -> None:
    """Measure the cells that arrive on standard input, until it ends. `options`: the fields of the worker, as JSON."""
    storage, worker = Storage(root), from_json(Worker, options)
    answers, orders = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    os.dup2(2, 1)  # what libraries print goes to standard error
    queue = SimpleQueue[bytes]()

    def read() -> None:  # in a thread, so that a worker whose driver is gone ends at once
        for line in orders:
            queue.put(line)
        os._exit(0)  # the driver is gone or has no more cells

    threading.Thread(target=read, daemon=True).start()
    while True:
        order = from_json(Order, queue.get())
        _send(answers, worker.run(storage, order.cell, order.attempt, partial(_send, answers), order.id))


def _send(stream: IO[bytes], message: Order | str | Outcome) -> None:
    stream.write(json.dumps(plain(message)).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    try:
        serve(*sys.argv[1:])
    except BrokenPipeError:  # the driver is gone
        os._exit(1)
