"""Measure a model while it trains, within a budget of time, and without effect on the training.

    monitor = posleak.Monitor(model, every=500)
    for batch in batches:
        ...                                            # one optimiser step
        if logs := monitor.step():
            wandb.log(logs)

Evaluation mode, random state, autocast and compiled modules are those of the training again after a measurement:
weights end with the same bits as without a monitor. In several processes, all of them call `step`: each measures some
of the prompts, and rank 0 receives the results.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from posleak.analyses.trace.trace import trace as trace_sources
from posleak.errors import InputError, PosleakError, PosleakWarning, did_you_mean, error_line, warn
from posleak.inputs import Inputs
from posleak.models.parallel import DATA, everyone
from posleak.models.subject import Subject
from posleak.runs.measure import measure
from posleak.runs.spec import require_between, require_integer
from posleak.signatures import checked
from posleak.sweeps.cells import MEASURE, TRACE, Cell
from posleak.sweeps.numbers import CellResults
from posleak.sweeps.state import CELL_FILE, FINISHED, Seconds
from posleak.sweeps.storage import Storage
from posleak.sweeps.work import finished

from .logs import SECONDS, defined, flat_logs, parse_rules

BUDGET = 0.02
"""Default share of the training time that measurements may take."""

OF_BOTH = {"length", "prompts", "seed", "bos", "origin", "edits", "metrics", "max_memory"}
OPTIONS = {MEASURE: OF_BOTH | {"batch", "density", "loss"}, TRACE: OF_BOTH | {"donor"}}
"""Options of `posleak.measure` and `posleak.trace` that a monitor passes on."""


class Monitor:
    """Measures a model in training. `steps`: optimiser steps so far; `should_stop`: whether a rule of `stop` applied.

    history   the results of every measurement by step, on all processes
    spent     seconds that measurements took
    """

    @checked
    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        inputs: Inputs = "random",
        *,
        every: int = 500,
        budget: float | None = BUDGET,
        trace: bool = False,
        layers: bool = False,
        alert: str | Iterable[str] = (),
        stop: str | Iterable[str] = (),
        out: str | Path | None = None,
        name: str = "model",
        **options: Any,
    ) -> None:
        """Prepare measurements; nothing is measured yet.

        model       a transformers model, also wrapped by torch (compile, DistributedDataParallel, FSDP2) or peft
        tokenizer   needed for texts and chats only
        inputs      source of the prompts, or your own prompts, as in `posleak.measure`; the same in every measurement
        every       optimiser steps between measurements
        budget      largest share of the training time that measurements may take: a measurement that would exceed it is
                    postponed. The first one is always made. None: no limit
        trace       also trace where leakage comes from (`posleak.trace`), which takes about five times as long
        layers      also return the numbers of every layer
        alert       rules, such as "sink_attention>0.3": a warning is issued if the whole interval satisfies one
        stop        rules that also set `should_stop`
        out         folder for the results of every measurement: `posleak collect` makes a table and a page of curves
        name        name of the training run in tables
        options     further options of `posleak.measure` or `posleak.trace`: length, prompts, seed, bos, loss …

        Example: `posleak.Monitor(model, every=100, length=256, alert="sink_attention>0.3")`
        """
        self.kind = TRACE if trace else MEASURE
        for option in options:
            if option not in OPTIONS[self.kind]:
                raise InputError(
                    f"unknown option of a monitor that makes a {self.kind}", where="Monitor", got=option,
                    remedy=did_you_mean(option, OPTIONS[self.kind]),
                )  # fmt: skip
        require_between("every", require_integer("every", every), 1)
        if budget is not None and not 0 < budget <= 1:
            raise InputError("the budget is a share of the training time", where="budget", got=budget,
                             expected="more than 0, at most 1, or None for no limit")  # fmt: skip
        self.model, self.tokenizer, self.inputs, self.options = model, tokenizer, inputs, options
        self.every, self.budget, self.layers, self.name = every, budget, layers, name
        self.alerts, self.stops = parse_rules(alert), parse_rules(stop)
        self.storage = None if out is None else Storage(str(out))
        self.checkpoints = Path(name)
        self.steps, self.spent, self.should_stop = 0, 0.0, False
        self.history: dict[int, dict[str, float]] = {}
        self._due, self._started, self._last = False, time.perf_counter(), 0.0
        self._warned = set[str]()

    def step(self) -> dict[str, float] | None:
        """Count an optimiser step. Return results if a measurement is due and within the budget, on rank 0; else None.

        Call it after the step of the optimiser, in all processes.
        """
        self.steps += 1
        self._due |= self.steps % self.every == 0
        return self.measure() if self._due and self.affordable() else None

    def affordable(self) -> bool:
        """Return whether another measurement is within the budget. All processes decide as rank 0 does."""
        trained = time.perf_counter() - self._started - self.spent
        fits = self.budget is None or not self._last or self.spent + self._last <= self.budget * trained
        if not fits:
            self._warn_once(
                f"a measurement takes {self._last:.1f} s: measurements are postponed to stay within {self.budget:.0%} "
                "of the training time (budget=None: no limit; fewer prompts or a shorter length take less time)"
            )
        return everyone().share(fits)[0] if self.budget is not None and everyone().size > 1 else fits

    def measure(self) -> dict[str, float] | None:
        """Measure now, whatever the budget, and return the results on rank 0; None on other processes.

        If an error occurs after a first successful measurement, a warning is issued, and the training can go on.
        """
        started, self._due, ranks = time.perf_counter(), False, everyone()
        try:
            results, notes = self._results()
        except PosleakError as error:
            if not self.history:
                raise
            warn(f"step {self.steps} is not measured: {error_line(error)}")
            return None
        logs = flat_logs(results, layers=self.layers)
        self._last = time.perf_counter() - started
        if self.storage is not None and ranks.writes:
            self._write(self.storage, results, notes)
        for rule in (*self.alerts, *self.stops):
            if (broken := rule.broken_by(logs)) is not None:
                warn(f"step {self.steps}: {broken}")
                self.should_stop |= rule in self.stops
        self._last = time.perf_counter() - started
        self.spent += self._last
        self.history[self.steps] = defined(logs) | {SECONDS: self._last}
        return self.history[self.steps] if ranks.writes else None

    def _results(self) -> tuple[CellResults, list[str]]:
        """Measure the model as it is now; issue each warning once."""
        kinds = {"cpu", *(parameter.device.type for parameter in self.model.parameters())}
        with ExitStack() as stack:
            caught = stack.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always", PosleakWarning)
            for kind in kinds:
                if kind != "cpu":
                    torch.accelerator.synchronize()
                if torch.amp.is_autocast_available(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            parallel = DATA if everyone().size > 1 else None
            subject = Subject.of(self.model, self.tokenizer, self.name, parallel=parallel)
            if self.kind == MEASURE:
                results = CellResults(measure(subject, self.inputs, **self.options))
            else:
                traced = trace_sources(subject, self.inputs, **self.options)
                results = CellResults(traced.ordinary, traced)
        notes = [str(each.message) for each in caught]
        for note in notes:
            self._warn_once(note)
        return results, notes

    def _warn_once(self, note: str) -> None:
        if note not in self._warned:
            self._warned.add(note)
            warn(note)

    def _write(self, storage: Storage, results: CellResults, notes: list[str]) -> None:
        """Write the results as a finished cell of a sweep, without the arrays per prompt."""
        run = results.run.record
        cell = Cell(
            str(self.checkpoints / f"checkpoint-{self.steps}"), run.spec, self.kind,
            title=f"{self.name}, step {self.steps}", series=self.name, step=self.steps,
            donor=self.options.get("donor", Cell.donor),
        )  # fmt: skip
        with storage.work_folder(cell.path) as folder:
            results.write(folder)
            record = finished(storage, cell, folder, run, (None, None), Seconds(0.0, self._last, 0.0), notes)
            storage.write(f"{cell.path}/{CELL_FILE}", FINISHED.text(record).encode())
