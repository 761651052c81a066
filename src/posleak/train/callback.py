"""A callback for the Trainer of transformers, and so for the trainers of TRL."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from posleak.errors import InputError
from posleak.inputs import Inputs
from posleak.signatures import checked

from .monitor import BUDGET, Monitor

EVALUATE, SAVE = EVENTS = ("evaluate", "save")
FOLDER = "posleak"
"""Folder of the results in the output folder of the training."""


class LeakageCallback(TrainerCallback):
    """Measures the model of a Trainer and logs the results through `trainer.log`, so that every reporter gets them."""

    @checked
    def __init__(
        self,
        trainer: Any,
        inputs: Inputs = "random",
        *,
        every: int | str | Iterable[str] = EVENTS,
        first: bool = True,
        budget: float | None = BUDGET,
        trace: bool = False,
        layers: bool = False,
        alert: str | Iterable[str] = (),
        stop: str | Iterable[str] = (),
        out: str | Path | None = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        """Prepare measurements of `trainer.model`.

        trainer   a Trainer of transformers, or of a library that is based on it
        inputs    source of the prompts, as in `posleak.measure`
        every     when to measure: "evaluate", "save", both, or a number of optimiser steps
        first     also measure before the first step
        stop      rules, such as "total>2": the training is stopped if the whole interval satisfies one
        out       folder for the results, which `posleak collect` reads; by default posleak/ in the trainer's output
                  folder, next to the checkpoints
        name      name of the training run; by default that of the trainer, or the name of its output folder

        budget, trace, layers, alert and further options are those of `posleak.Monitor`.

        Example: `trainer.add_callback(posleak.train.LeakageCallback(trainer, every=500))`
        """
        events = (every,) if isinstance(every, int | str) else tuple(every)
        if not events or any(event not in EVENTS and not (isinstance(event, int) and event > 0) for event in events):
            raise InputError(
                "unknown time of measurements", where="every", got=repr(every),
                expected="a number of steps, evaluate, save, or both",
            )  # fmt: skip
        folder = Path(trainer.args.output_dir)
        self.trainer, self.events, self.first = trainer, events, first
        self.monitor = Monitor(
            trainer.model, trainer.processing_class, inputs, budget=budget, trace=trace, layers=layers, alert=alert,
            stop=stop, out=folder / FOLDER if out is None else out,
            name=name or trainer.args.run_name or folder.name, **options,
        )  # fmt: skip
        self.monitor.checkpoints = folder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measure the model before the first step."""
        if self.first and state.global_step == 0:
            self._measure(state, control, always=True)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure after every n-th step, if `every` is a number."""
        if any(isinstance(event, int) and state.global_step % event == 0 for event in self.events):
            self._measure(state, control)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure after an evaluation."""
        if EVALUATE in self.events:
            self._measure(state, control)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Measure the model of a checkpoint."""
        if SAVE in self.events:
            self._measure(state, control)

    def _measure(self, state: TrainerState, control: TrainerControl, *, always: bool = False) -> None:
        monitor = self.monitor
        monitor.steps = state.global_step
        if monitor.steps not in monitor.history and (always or monitor.affordable()):
            monitor.measure()
            if (logs := monitor.history.get(monitor.steps)) is not None:  # on all processes, as the trainer's own logs
                log_loss = control.should_log  # which logging resets
                self.trainer.log(dict(logs))
                control.should_log = log_loss
            control.should_training_stop |= monitor.should_stop
