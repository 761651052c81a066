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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from queue import SimpleQueue
from typing import IO, Any

from posleak.typed import from_json, plain

from .cells import Cell
from .state import Outcome, Tracker, WorkOrder
from .storage import Storage
from .work import Worker, worker_died

PAUSE = 2.0
"""Seconds before a cell that another sweep has is checked again."""

GRACE = 10.0
"""Seconds before a worker process that does not end is killed."""

STDERR_BYTES = 2000
"""How much of a dead worker's standard error is read."""


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
        while cells := sorted(tracker.open, key=lambda cell: tuple(map(str, cell.group))):
            free = [cell for cell in cells if not storage.is_locked(cell.folder)]
            tracker.elsewhere = len(cells) - len(free)
            for cpus, group in groupby(free, key=lambda cell: cell.resources.cpus):
                worker = replace(self.worker, threads=None if cpus is None else max(1, int(cpus)))
                self._run_group(deque(group), worker, storage, tracker)
            tracker.show()
            if not free:
                time.sleep(PAUSE)

    def _run_group(self, waiting: deque[Cell], worker: Worker, storage: Storage, tracker: Tracker) -> None:
        """Measure cells in one process, and in a new one whenever it dies. Cells that another sweep took stay open."""
        while waiting:
            with _worker_process(worker, storage) as process:
                while waiting:
                    order = tracker.order(waiting.popleft())
                    if (outcome := process.measure(order, tracker)) is None:
                        if worker_died(storage, tracker, order.cell, process.how_it_ended, worker.retries):
                            waiting.appendleft(order.cell)  # the same cell again, in a new process
                        break
                    tracker.settled(order.cell, outcome)


# -- the driver --------------------------------------------------------------------------------------------------------


@dataclass
class _Process:
    """A worker process as the driver sees it."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def measure(self, order: WorkOrder, tracker: Tracker) -> Outcome | None:
        """Return how the cell ended; None if the worker died."""
        orders, answers = self.process.stdin, self.process.stdout
        assert orders is not None
        assert answers is not None
        try:
            _send(orders, order)
        except BrokenPipeError:
            return None
        for line in answers:
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
        order = from_json(WorkOrder, queue.get())
        outcome = worker.run(
            storage, order.cell, order.attempt, lambda status: _send(answers, Message(status)), order.id
        )
        _send(answers, Message(outcome=outcome))


def _send(stream: IO[bytes], message: WorkOrder | Message) -> None:
    stream.write(json.dumps(plain(message)).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    try:
        serve(*sys.argv[1:])
    except BrokenPipeError:  # the driver is gone
        os._exit(1)
