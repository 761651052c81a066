"""The engine on Ray: actors that keep a model in memory and take its cells in turn, on this machine or on a cluster.

Ray places actors by what their cells ask for (CPUs, GPUs, memory), starts their processes and notices when they die.
Every actor has one cell at a time and writes it into the storage itself; the driver only hears how it ended. The cell
of an actor that died is given to another one, a few times.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from posleak.errors import InputError, warn
from posleak.text import format_bytes, one_line

from .board import Board
from .cells import Cell, Resources
from .estimate import memory_of
from .local import PAUSE, Order, Settings, died
from .storage import Storage
from .work import Outcome, keep_failure

LOOK = 1.0
"""Seconds after which the board is shown again, while nothing happens."""

DEFAULT_CPUS = 1.0

ANSWER = 10.0
"""Seconds within which somebody must answer at an address."""


@dataclass(frozen=True)
class OnRay:
    """Cells on a Ray cluster: at `address`, or one that is started here and goes when the sweep ends.

    workers   how many actors at most; None: as many as the cluster's processors allow
    """

    settings: Settings
    address: str | None = None
    workers: int | None = None

    def run(self, storage: Storage, board: Board) -> None:
        """Do every open cell."""
        cells = board.open
        if not cells:
            return
        ray = require_ray()
        self._require_shared(storage)
        # Ray prints what it has to say on standard output, where results belong.
        with contextlib.redirect_stdout(sys.stderr), _cluster(ray, self.address):
            require_room(ray, cells, strict=self.address is None)
            cpus = min(_cpus(cell) for cell in cells)
            fitting = max(1, int(ray.cluster_resources().get("CPU", 1) / max(cpus, 0.001)))
            crew = _Crew(ray, self.settings, storage.everywhere, board, min(self.workers or fitting, len(cells)))
            try:
                crew.work(cells)
            finally:
                crew.dismiss()

    def _require_shared(self, storage: Storage) -> None:
        if self.address is not None and storage.local is not None:
            warn(
                f"results go into the folder {storage.local}: every machine of the cluster must see it under this "
                "path; if there is no such disk, use --out with an address such as s3://bucket/sweep"
            )


def require_ray() -> Any:
    """Ray, or an error that says how to get it."""
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "Ray is not installed", where="--engine ray", got=one_line(error),
            remedy='pip install "posleak[ray]"; or use --engine local, which needs nothing else',
        ) from error  # fmt: skip
    return ray


def require_room(ray: Any, cells: list[Cell], *, strict: bool) -> None:
    """Refuse what no machine of the cluster has; a cluster that grows may have it later, so there it is said only."""
    machines = _machines(ray)
    for resources in dict.fromkeys(cell.resources for cell in cells):
        asked = {"CPU": resources.cpus or DEFAULT_CPUS, "GPU": resources.gpus, "memory": resources.memory or 0}
        if any(all(machine.get(name, 0) >= need for name, need in asked.items()) for machine in machines):
            continue
        have = "; ".join(_words({name: machine.get(name, 0) for name in asked}) for machine in machines)
        what = "no machine of the cluster has what these cells ask for"
        if strict:
            remedy = "ask for less under `resources` in the manifest"
            raise InputError(what, where="resources", got=_words(asked), expected=have, remedy=remedy)
        warn(f"{what} ({_words(asked)}): they wait until one has; now there are {have}")


def _machines(ray: Any) -> list[dict[str, float]]:
    """What each machine of the cluster has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _words(resources: dict[str, float]) -> str:
    """`2 CPUs, 1 GPU, 8.0 GB`"""
    counts = [f"{resources[name]:g} {name}s" for name in ("CPU", "GPU")]
    return ", ".join([*counts, *([format_bytes(resources["memory"])] if resources["memory"] else [])])


class Hand:
    """What an actor is: a worker in a process of its own."""

    def __init__(self, settings: Settings, storage: Storage, threads: int) -> None:
        self._worker = settings.worker(storage, threads)

    def ready(self) -> int:
        return os.getpid()

    def run(self, order: Order) -> Outcome:
        return self._worker.run(order.cell, order.attempt, expected=order.id)


@dataclass
class _Member:
    """An actor, seen from the driver: the model that it is for, and the cell that it has."""

    actor: Any
    group: tuple[str | None, ...]
    request: dict[str, Any]
    cell: Cell | None = None


@dataclass
class _Crew:
    """Actors at work on the cells of a sweep."""

    ray: Any
    settings: Settings
    storage: Storage
    board: Board
    most: int
    groups: dict[tuple[str | None, ...], deque[Cell]] = field(default_factory=dict)
    members: dict[Any, _Member] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    later: list[tuple[float, Cell]] = field(default_factory=list)

    def work(self, cells: list[Cell]) -> None:
        """Until every cell has ended."""
        for cell in cells:
            self._queue(cell)
        while self.members or self.later or any(self.groups.values()):
            self._take_up()
            self._hire()
            done, _ = self.ray.wait(list(self.members), num_returns=1, timeout=LOOK) if self.members else ([], [])
            for future in done:
                self._heard(future)
            if not done:
                self.board.show()
            if not self.members:
                time.sleep(PAUSE / 10)

    def dismiss(self) -> None:
        """End every actor; what they have finished is in the storage."""
        for member in self.members.values():
            with contextlib.suppress(Exception):
                self.ray.kill(member.actor)
        self.members.clear()

    def _queue(self, cell: Cell) -> None:
        self.groups.setdefault(cell.group, deque()).append(cell)

    def _take_up(self) -> None:
        """Cells that somebody else was at are looked at again after a while."""
        now = time.monotonic()
        for _, cell in [each for each in self.later if each[0] <= now]:
            self._queue(cell)
        self.later = [each for each in self.later if each[0] > now]
        self.board.elsewhere = len(self.later)

    def _hire(self) -> None:
        """New actors, as long as there may be more: for the model with most cells per actor."""
        while len(self.members) < self.most:
            at = [member.group for member in self.members.values()]
            waiting = {group: len(cells) - at.count(group) for group, cells in self.groups.items()}
            wanted = [group for group, count in waiting.items() if count > 0]
            if not wanted:
                return
            group = max(wanted, key=lambda each: len(self.groups[each]) / (1 + at.count(each)))
            request = self._request(self.groups[group][0])
            actor = self.ray.remote(Hand).options(max_restarts=0, **request).remote(
                self.settings, self.storage, max(1, int(request["num_cpus"]))
            )  # fmt: skip
            self.members[actor.ready.remote()] = _Member(actor, group, request)

    def _heard(self, future: Any) -> None:
        """An actor is ready, or a cell has ended, or its actor died. Whoever is left gets the next cell."""
        member = self.members.pop(future)
        try:
            outcome = self.ray.get(future)
        except self.ray.exceptions.RayTaskError as error:  # posleak's own mistake: workers keep every other error
            self._settle(member, keep_failure(self.storage, _cell(member), one_line(error), str(error), 1))
        except self.ray.exceptions.RayError as error:
            self._lost(member, error)
            return
        else:
            if isinstance(outcome, Outcome):
                self._settle(member, outcome)
        self._next(member)

    def _settle(self, member: _Member, outcome: Outcome) -> None:
        cell, member.cell = _cell(member), None
        if outcome.busy:
            self.attempts[cell.id] -= 1
            self.later.append((time.monotonic() + PAUSE, cell))
            self.board.elsewhere = len(self.later)
            self.board.stopped(cell)
        else:
            self.board.ended(outcome)

    def _lost(self, member: _Member, error: Exception) -> None:
        """The actor is dead: its cell goes to another one, unless that has happened too often."""
        cell = member.cell
        if cell is None:  # it died before it had a cell: the first one of its model counts it
            cell = self.groups[member.group].popleft() if self.groups.get(member.group) else None
            if cell is None:
                return
            self.attempts[cell.id] = self.attempts.get(cell.id, 0) + 1
        if self.attempts[cell.id] > self.settings.retries:
            self.board.ended(died(self.storage, cell, self.attempts[cell.id], one_line(error, 200)))
        else:
            self.board.stopped(cell)
            self.groups[cell.group].appendleft(cell)

    def _next(self, member: _Member) -> None:
        if not self.groups.get(member.group) and not self._turn_to_another(member):
            self.ray.kill(member.actor)
            return
        member.cell = cell = self.groups[member.group].popleft()
        self.attempts[cell.id] = self.attempts.get(cell.id, 0) + 1
        self.board.started(cell, "on the cluster")
        order = Order(cell, cell.id, self.attempts[cell.id])
        self.members[member.actor.run.remote(order)] = member

    def _request(self, cell: Cell) -> dict[str, Any]:
        """What Ray is asked for, for an actor with this cell's model. Memory that is guessed is no more than the
        largest machine has: a guess must not keep a cell waiting for ever."""
        wish: Resources = cell.resources
        memory, guess = wish.memory, memory_of(cell)
        if memory is None and guess is not None:
            memory = min(guess, int(max(machine.get("memory", 0) for machine in _machines(self.ray))))
        found: dict[str, Any] = {"num_cpus": _cpus(cell), "num_gpus": wish.gpus}
        return found | ({} if memory is None else {"memory": memory})

    def _turn_to_another(self, member: _Member) -> bool:
        """Let an actor whose model is done take up another one that asks for no more, if nobody is at it."""
        taken = {other.group for other in self.members.values()}
        for group, cells in self.groups.items():
            if cells and group not in taken and _fits(self._request(cells[0]), member.request):
                member.group = group
                return True
        return False


def _fits(asked: dict[str, Any], given: dict[str, Any]) -> bool:
    same = all(asked[name] == given[name] for name in ("num_cpus", "num_gpus"))
    return same and asked.get("memory", 0) <= given.get("memory", 0)


def _cell(member: _Member) -> Cell:
    assert member.cell is not None
    return member.cell


def _cpus(cell: Cell) -> float:
    return DEFAULT_CPUS if cell.resources.cpus is None else cell.resources.cpus


@contextmanager
def _cluster(ray: Any, address: str | None) -> Iterator[None]:
    """Be connected to a cluster. One that was there before, in this process too, stays."""
    if ray.is_initialized():
        yield
        return
    require_reachable(address)
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    try:
        ray.init(**quiet, **({"include_dashboard": False} if address is None else {"address": address}))
    except Exception as error:
        raise _unreachable(address, error) from error
    try:
        yield
    finally:
        ray.shutdown()


def require_reachable(address: str | None) -> None:
    """Refuse an address where nobody answers: Ray itself would wait for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():  # `auto`, or none
        return
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, error) from error


def _unreachable(address: str | None, error: Exception) -> InputError:
    return InputError(
        "the Ray cluster cannot be reached", where="--address" if address else "--engine ray",
        got=f"{address}: {one_line(error)}" if address else one_line(error),
        remedy="start it with `ray start --head`, and give the address that this prints, or leave --address out",
    )  # fmt: skip
