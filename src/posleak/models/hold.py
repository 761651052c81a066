"""Reserve a model for one thread, in evaluation mode, and restore it afterwards.

    with exclusive(model):
        ...             # its weights, attention and outputs are its own; attach(model) is allowed inside

Attaching changes a model, its config and, for some edits, its weights. Other threads that need the same model wait. A
thread that has the model attached already would deadlock, so it gets an error instead. Models that share a config
object count as one.

While a model is held, every module is in evaluation mode: dropout would be measured as leakage. On release, also after
an error, every module returns to its own mode. `preserve_random_state` does the same for torch's random state, but only
for models that draw random numbers: the state is shared by all threads, and restoring it while another thread trains
would give that thread the same numbers twice.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from posleak.errors import RunError

T = TypeVar("T")

POLL_SECONDS = 1.0
"""How often a waiting thread checks that the holder is still alive."""


@dataclass(eq=False, repr=False)
class Hold:
    """A reservation of a model by a thread, with all configs of the model. `attached`: posleak replaces its attention.

    `cleanup` restores the model. It is kept here because the garbage collector, when it closes a generator, first
    clears weak references that are reachable only through it. torch's hook handles rely on such a reference: without it
    they would not be removed.
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
"""Holds by the id of each config, the innermost last. They keep the configs alive, so that ids stay unique."""

_changed = threading.Condition()
"""Guards `_holds`. Its lock is reentrant: the garbage collector may close a generator, which releases a model, at any
line of any thread, those below included."""


def configs_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """Return every config that selects the attention of a part of the model, each once."""
    configs: dict[int, Any] = {}
    pending = [m.config for m in model.modules() if "config" in vars(m) or hasattr(type(m), "config")]
    while pending:
        config = pending.pop()
        if id(config) not in configs:
            configs[id(config)] = config
            inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
            pending += [sub for sub in inner if sub is not None]
    return tuple(configs.values())


@contextmanager
def exclusive(model: PreTrainedModel) -> Iterator[None]:
    """Reserve the model for this thread, with its own attention. Other threads wait; the same thread may reenter."""
    with holding(Hold.of(model, attached=False)), preserve_random_state(model):
        yield


@contextmanager
def holding(hold: Hold) -> Iterator[None]:
    """Wait for the model and hold it. Raise if this thread, or one that has ended, has it attached.

    Every module is in evaluation mode inside, and returns to its own mode on exit.
    """
    training = list[torch.nn.Module]()
    try:
        _acquire(hold)
        training += [module for module in hold.model.modules() if module.training]
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
        _release(hold)


@contextmanager
def preserve_random_state(model: torch.nn.Module) -> Iterator[None]:
    """Restore torch's random state on exit if the model is in `random_models`."""
    if model not in random_models:
        yield
        return
    with torch.random.fork_rng(devices=cuda_devices(model)):
        yield


random_models: WeakSet[torch.nn.Module] = WeakSet()
"""Models that have drawn random numbers in a forward pass."""


def cuda_devices(model: torch.nn.Module) -> list[int]:
    """Return the indices of the CUDA devices that the model is on."""
    return sorted({tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"})


def random_states(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return torch's random states that a pass of the model could change."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in cuda_devices(model))]


def undraw(model: PreTrainedModel, run: Callable[[], T]) -> T:
    """Return run(), a pass of the model. If it draws random numbers, restore the random state and remember the model.

    If the state has changed, the model is run a second time to find out whether it, or another thread, changed it.
    """
    before, result = random_states(model), run()
    if all(map(torch.equal, before, random_states(model))):
        return result
    with _Draws() as draws:  # type: ignore[no-untyped-call]
        run()
    if draws.seen:
        random_models.add(model)
        torch.set_rng_state(before[0])
        for device, state in zip(cuda_devices(model), before[1:], strict=True):
            torch.cuda.set_rng_state(state, device)
    return result


class _Draws(TorchDispatchMode):
    """Detector of random draws by this thread; other threads may draw random numbers at the same time."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        random = torch.Tag.nondeterministic_seeded in func.tags
        self.seen |= random and "attention" not in func.name()  # attention dropout is rejected elsewhere
        return func(*args, **(kwargs or {}))


def _acquire(hold: Hold) -> None:
    for last_try in (False, True):
        with _changed:
            while (other := _conflict(hold)) is not None and not other.is_mine and other.thread.is_alive():
                _changed.wait(POLL_SECONDS)
            if other is None:
                for config in hold.configs:
                    _holds.setdefault(id(config), []).append(hold)
                return
        if last_try:
            raise _already_attached(hold, other)
        gc.collect()  # closes abandoned generators that a reference cycle keeps alive


def _conflict(hold: Hold) -> Hold | None:
    """Return a hold of another thread, or an attachment of this one."""
    others = [other for config in hold.configs for other in tuple(_holds.get(id(config), ()))]
    return next((other for other in others if other.attached or other.thread is not hold.thread), None)


def _release(hold: Hold) -> None:
    """Release a hold. May be called from any thread, and for a hold that was never acquired."""
    with _changed:
        for config in hold.configs:
            if remaining := [other for other in _holds.pop(id(config), ()) if other is not hold]:
                _holds[id(config)] = remaining
        _changed.notify_all()


def _already_attached(hold: Hold, other: Hold) -> RunError:
    shared = "" if other.model is hold.model else ", or another one that shares its config"
    holder = "this thread, which would wait for itself" if other.is_mine else f"{other.thread.name}, which has ended"
    return RunError(
        f"the model is being measured already{shared}", where=type(hold.model).__name__, got=f"attached by {holder}",
        expected="one measurement of a model at a time",
        remedy="end the other measurement first: leave its `with attach(...)`, or close() its generator of chunks",
    )  # fmt: skip


def wrong_thread_error(hold: Hold) -> RunError:
    """Return the error for a forward pass in another thread than the one that measures."""
    return RunError(
        "the model is being measured in another thread, where this forward pass would be counted",
        where=type(hold.model).__name__,
        got=f"a pass in {threading.current_thread().name}, while {hold.thread.name} measures",
        remedy="wait until the measurement is finished, or give this thread a copy of the model",
    )


def this_thread_only(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module hook that ignores forward passes of other threads."""
    thread = threading.get_ident()

    @functools.wraps(hook)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs) if threading.get_ident() == thread else None

    return filtered
