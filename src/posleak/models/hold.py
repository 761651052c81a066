"""Exclusive use of a model: one thread at a time, in evaluation mode, and given back as it was.

    with exclusive(model):
        ...             # its weights, its attention and its outputs are its own; attach(model) is allowed inside

Attaching changes a model, its config, and for some edits its weights. Another thread that wants the same model waits.
The thread that has it attached would wait for itself, so that it is refused. Models that were built from one config
object share it, and count as one.

While a model is held, every module is in evaluation mode: dropout would be measured as leakage. On release, also after
an error, every module has its own mode again. `preserve_random_state` does the same for the random state of torch, for
models that were seen to draw random numbers: the state belongs to all threads, and one that trains something else must not get
the same numbers twice.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from transformers import PreTrainedModel

from posleak.errors import RunError

PATIENCE = 1.0
"""Seconds between two looks at whether the thread that is waited for still lives."""


@dataclass(eq=False, repr=False)
class Hold:
    """A model in somebody's hands: the thread, and all configs of the model. `attached`: its attention is ours.

    cleanup: what gives the model back, kept here because the garbage collector, when it closes a generator, empties the
    weak references that are reachable only through it, and torch's handles of hooks are such: they would not be removed
    """

    model: PreTrainedModel
    attached: bool
    thread: threading.Thread
    configs: tuple[Any, ...]
    cleanup: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def of(cls, model: PreTrainedModel, *, attached: bool) -> Hold:
        return cls(model, attached, threading.current_thread(), configs_of(model))

    @property
    def is_mine(self) -> bool:
        return self.thread is threading.current_thread()


_holds: dict[int, list[Hold]] = {}
"""By the id of each config: who holds it, the innermost last. It keeps its configs alive, so that ids stay theirs."""

_changed = threading.Condition()
"""Guards `_holds`. Its lock can be taken twice: the garbage collector may close a generator, which lets go of a model,
at any line of any thread, those below included."""


def configs_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """Every config that says which attention some part of the model uses, each once."""
    found: dict[int, Any] = {}
    todo = [module.config for module in model.modules() if "config" in vars(module) or hasattr(type(module), "config")]
    while todo:
        config = todo.pop()
        if id(config) not in found:
            found[id(config)] = config
            inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
            todo += [each for each in inner if each is not None]
    return tuple(found.values())


@contextmanager
def exclusive(model: PreTrainedModel) -> Iterator[None]:
    """Reserve the model for this thread, with its own attention; others wait. The same thread may take it again."""
    with holding(Hold.of(model, attached=False)), preserve_random_state(model):
        yield


@contextmanager
def holding(hold: Hold) -> Iterator[None]:
    """Wait for the model and hold it; refused where this thread, or one that has ended, has it attached."""
    try:
        _take(hold)
        with evaluation_mode(hold.model):
            yield
    finally:
        _let_go(hold)


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode, and restore the mode of each on exit."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def preserve_random_state(model: torch.nn.Module) -> Iterator[None]:
    """Restore torch's random state on exit if the model draws random numbers (`random_models`)."""
    if model not in random_models:
        yield
        return
    with torch.random.fork_rng(devices=cuda_devices(model)):
        yield


random_models: WeakSet[torch.nn.Module] = WeakSet()
"""Models that were seen to draw random numbers in a forward pass."""


def cuda_devices(model: torch.nn.Module) -> list[int]:
    """Return the indices of the CUDA devices that the model is on."""
    return sorted({tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"})


def random_states(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return torch's random states that a pass of the model could change."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in cuda_devices(model))]


def _take(hold: Hold) -> None:
    for last_try in (False, True):
        with _changed:
            while (other := _in_the_way(hold)) is not None and not other.is_mine and other.thread.is_alive():
                _changed.wait(PATIENCE)
            if other is None:
                for config in hold.configs:
                    _holds.setdefault(id(config), []).append(hold)
                return
        if last_try:
            raise _measured_already(hold, other)
        gc.collect()  # closes generators that were given up, but are still held by a circle of references


def _in_the_way(hold: Hold) -> Hold | None:
    """A hold of another thread, or an attachment of this one."""
    others = [other for config in hold.configs for other in tuple(_holds.get(id(config), ()))]
    return next((other for other in others if other.attached or other.thread is not hold.thread), None)


def _let_go(hold: Hold) -> None:
    """May be called from any thread, and for a hold that was never taken."""
    with _changed:
        for config in hold.configs:
            left = [other for other in _holds.get(id(config), ()) if other is not hold]
            if left:
                _holds[id(config)] = left
            else:
                _holds.pop(id(config), None)
        _changed.notify_all()


def _measured_already(hold: Hold, other: Hold) -> RunError:
    shared = "" if other.model is hold.model else ", or rather another one that shares its config"
    who = "by this thread, which would wait for itself" if other.is_mine else f"by {other.thread.name}, which has ended"
    return RunError(
        f"the model is being measured already{shared}", where=type(hold.model).__name__, got=f"attached {who}",
        expected="one measurement of a model at a time",
        remedy="finish the other one first: leave its `with attach(...)`, or call close() on its generator of chunks",
    )  # fmt: skip


def wrong_thread_error(hold: Hold) -> RunError:
    """For a forward pass in another thread than the one that measures."""
    return RunError(
        "the model is being measured in another thread, where this forward pass would be counted",
        where=type(hold.model).__name__,
        got=f"a pass in {threading.current_thread().name}, while {hold.thread.name} measures",
        remedy="wait until the measurement is finished, or give this thread a copy of the model",
    )


def this_thread_only(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A module hook that is deaf to forward passes of other threads."""
    thread = threading.get_ident()

    @functools.wraps(hook)
    def heard(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs) if threading.get_ident() == thread else None

    return heard
