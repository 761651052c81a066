"""The engine on Ray: actors that keep a model in memory and measure its cells, on this machine or on a cluster.

Ray places actors by the resources of their cells (CPUs, GPUs, memory) and reports when one dies. An actor has one cell
at a time and writes it into the storage itself; the driver only receives the outcome. The cell of an actor that died is
given to another one, `retries` times.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from posleak.errors import InputError, warn
from posleak.text import format_bytes, one_line

from .cells import Cell, memory_of
from .local import rounds
from .state import Tracker
from .storage import Storage
from .work import Worker, worker_died, write_failure

REFRESH = 1.0
"""Seconds between reports of progress while nothing happens."""

DEFAULT_CPUS, CONNECT_TIMEOUT = 1.0, 10.0

Group = tuple[str | None, ...]


@dataclass(frozen=True)
class OnRay:
    """Engine on the Ray cluster at `address`, or on one that is started here and ends with the sweep.

    workers   the largest number of actors; None: as many as the cluster's processors allow
    """

    worker: Worker
    address: str | None = None
    workers: int | None = None

    def run(self, storage: Storage, tracker: Tracker) -> None:
        """Measure every open cell."""
        cells, ray = tracker.open, require_ray()
        if self.address is not None and storage.local is not None:
            warn(
                f"results go into the folder {storage.local}: every machine of the cluster must see it under this "
                "path; if there is no shared disk, use --out with an address such as s3://bucket/sweep"
            )
        # Ray prints on standard output, which is for results.
        with contextlib.redirect_stdout(sys.stderr), _cluster(ray, self.address):
            require_resources(ray, cells, strict=self.address is None)
            cpus = min(_cpus(cell) for cell in cells)
            fitting = max(1, int(ray.cluster_resources().get("CPU", 1) / max(cpus, 0.001)))
            most = min(self.workers or fitting, len(cells))
            for free in rounds(storage, tracker):
                _Scheduler(ray, self.worker, storage.absolute, tracker, most).run(free)


def require_ray() -> Any:
    """Return the module ray; raise InputError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "Ray is not installed", where="--engine ray", got=one_line(error),
            remedy='pip install "posleak[ray]"; or use --engine local, which needs nothing else',
        ) from error  # fmt: skip
    return ray


def require_resources(ray: Any, cells: list[Cell], *, strict: bool) -> None:
    """Raise InputError if no machine has the resources of a cell; only warn if not `strict`: a cluster may grow."""
    machines = _machines(ray)
    for resources in dict.fromkeys(cell.resources for cell in cells):
        needed = {"CPU": resources.cpus or DEFAULT_CPUS, "GPU": resources.gpus, "memory": resources.memory or 0}
        if any(all(machine.get(name, 0) >= need for name, need in needed.items()) for machine in machines):
            continue
        available = "; ".join(_words({name: machine.get(name, 0) for name in needed}) for machine in machines)
        what = "no machine of the cluster has the resources of these cells"
        if strict:
            remedy = "reduce `resources` in the manifest"
            raise InputError(what, where="resources", got=_words(needed), expected=available, remedy=remedy)
        warn(f"{what} ({_words(needed)}): they wait until a machine has them; available now: {available}")


def _machines(ray: Any) -> list[dict[str, float]]:
    """Return the resources of each machine of the cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _words(resources: dict[str, float]) -> str:
    """Return, for example, `2 CPUs, 1 GPUs, 8.0 GB`."""
    counts = [f"{resources[name]:g} {name}s" for name in ("CPU", "GPU")]
    return ", ".join([*counts, *([format_bytes(resources["memory"])] if resources["memory"] else [])])


def _cpus(cell: Cell) -> float:
    return DEFAULT_CPUS if cell.resources.cpus is None else cell.resources.cpus


@dataclass
class _Actor:
    """The driver's view of an actor: the model that it is for, its resources, and its cell."""

    handle: Any
    group: Group
    request: dict[str, Any]
    cell: Cell | None = None


@dataclass
class _Scheduler:
    """Distributor of cells over actors.

    most       the largest number of actors
    groups     waiting cells by model
    actors     by the future of what they do now
    """

    ray: Any
    worker: Worker
    storage: Storage
    tracker: Tracker
    most: int
    groups: dict[Group, deque[Cell]] = field(default_factory=dict)
    actors: dict[Any, _Actor] = field(default_factory=dict)

    def run(self, cells: list[Cell]) -> None:
        """Give every cell to an actor, then end the actors; what they have finished is in the storage."""
        for cell in cells:
            self.groups.setdefault(cell.group, deque()).append(cell)
        try:
            while self.actors or any(self.groups.values()):
                self._start_actors()
                done, _ = self.ray.wait(list(self.actors), num_returns=1, timeout=REFRESH)
                for future in done:
                    self._handle(future)
                if not done:
                    self.tracker.show()
        finally:
            for actor in self.actors.values():
                with contextlib.suppress(Exception):
                    self.ray.kill(actor.handle)

    def _start_actors(self) -> None:
        """Start as many actors as are allowed, each for the model with most waiting cells per actor."""
        while len(self.actors) < self.most:
            taken = [actor.group for actor in self.actors.values()]
            wanted = [group for group, cells in self.groups.items() if len(cells) > taken.count(group)]
            if not wanted:
                return
            group = max(wanted, key=lambda each: len(self.groups[each]) / (1 + taken.count(each)))
            request = self._request(self.groups[group][0])
            worker = replace(self.worker, threads=max(1, int(request["num_cpus"])))
            handle = self.ray.remote(Worker).options(max_restarts=0, **request).remote(**asdict(worker))
            self.actors[handle.__ray_ready__.remote()] = _Actor(handle, group, request)

    def _handle(self, future: Any) -> None:
        """Handle an actor that is ready, has ended its cell, or died. Give a live actor the next cell."""
        actor = self.actors.pop(future)
        try:
            outcome = self.ray.get(future)
        except self.ray.exceptions.RayTaskError as error:  # an error of posleak: workers return all others
            assert actor.cell is not None
            outcome = write_failure(self.storage, actor.cell, error, 1)
        except self.ray.exceptions.RayError as error:
            self._actor_died(actor, error)
            return
        if actor.cell is not None:
            self.tracker.ended(outcome)
            actor.cell = None
        if not self.groups[actor.group] and not self._reassign(actor):
            self.ray.kill(actor.handle)
            return
        cell = actor.cell = self.groups[actor.group].popleft()
        attempt = self.tracker.attempt(cell, "on the cluster")
        self.actors[actor.handle.run.remote(self.storage, cell, attempt, expected=cell.id)] = actor

    def _actor_died(self, actor: _Actor, error: Exception) -> None:
        """Give the actor's cell to another one, unless that has happened too often."""
        cell = actor.cell
        if cell is None:  # it died before it had a cell: count that for the first one of its model
            if not self.groups[actor.group]:
                return
            cell = self.groups[actor.group].popleft()
            self.tracker.attempts[cell.id] += 1
        if worker_died(self.storage, self.tracker, cell, one_line(error, 200), self.worker.retries):
            self.groups[cell.group].appendleft(cell)

    def _request(self, cell: Cell) -> dict[str, Any]:
        """Return Ray's options for an actor with this cell's model.

        Memory that is estimated is limited to that of the largest machine: an estimate must not keep a cell waiting
        forever.
        """
        memory, estimated = cell.resources.memory, memory_of(cell)
        if memory is None and estimated is not None:
            memory = min(estimated, int(max(machine.get("memory", 0) for machine in _machines(self.ray))))
        request: dict[str, Any] = {"num_cpus": _cpus(cell), "num_gpus": cell.resources.gpus}
        return request | ({} if memory is None else {"memory": memory})

    def _reassign(self, actor: _Actor) -> bool:
        """Give an actor whose model is done another one that fits its resources and has no actor yet."""
        taken = {other.group for other in self.actors.values()}
        for group, cells in self.groups.items():
            if cells and group not in taken:
                needed, available = self._request(cells[0]), actor.request
                same = all(needed[name] == available[name] for name in ("num_cpus", "num_gpus"))
                if same and needed.get("memory", 0) <= available.get("memory", 0):
                    actor.group = group
                    return True
        return False


@contextlib.contextmanager
def _cluster(ray: Any, address: str | None) -> Iterator[None]:
    """Connect to a cluster, and disconnect afterwards unless this process was connected before."""
    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    try:
        if colon and port.isdecimal():  # if nothing answers there, Ray itself would wait for minutes
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()
        ray.init(**quiet, **({"include_dashboard": False} if address is None else {"address": address}))
    except Exception as error:
        raise InputError(
            "the Ray cluster cannot be reached", where="--address" if address else "--engine ray",
            got=f"{address}: {one_line(error)}" if address else one_line(error),
            remedy="start it with `ray start --head`, and pass the address that it prints; or omit --address",
        ) from error  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()
