"""Where a model writes absolute position on purpose, found by watching it: no model is known by name.

With one token repeated and no BOS, a causal model with relative positions computes the same state at every position.
The first module that turns equal states into different ones is where position enters:

    a table of positions (learned or sinusoidal), added by an embedding module or by the model's body itself
    a recurrent or convolutional layer, whose state starts empty at position 0
    attention with a learned sink logit, whose weights do not add up to one
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posleak.models import input_device
from posleak.models.hold import this_thread_only
from posleak.probe import attach, backbone, relative_difference
from posleak.rounding import AGREE

LENGTH = 37
"""A prime that no other axis of a model has as its size: the axis of positions is recognised by it."""

TABLE, RECURRENT, SINKS = "position table", "recurrent layer", "learned sink logits"
COUNTING = "recurrent layer that reads position ids"

REASONS = {
    TABLE: "it has a table of absolute positions ({module}), which writes position into the residual stream",
    RECURRENT: "{module} carries a state from token to token that starts empty, so that it counts positions",
    COUNTING: "the recurrent layer {module} reads position ids itself, and its output changes with them",
    SINKS: "the learned sink logits of {module} take a share that depends on how many keys a query sees",
}


@dataclass(frozen=True)
class Entrance:
    """The first place where position enters the residual stream other than through attention."""

    kind: str
    module: str

    @property
    def reason(self) -> str:
        return REASONS[self.kind].format(module=self.module)


@dataclass
class EntranceHook:
    """The first module whose output differs between positions although its input does not."""

    names: dict[int, str]
    found: str | None = None
    embedding: bool = False

    def look(self, module: torch.nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if self.found is not None or any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            return  # a rotary module's cosines are no part of the stream
        before = _differs(next(_along_positions([*args, *kwargs.values()]), None))
        after = _differs(next(_along_positions([out] if isinstance(out, Tensor) else list(_values(out))), None))
        table = isinstance(module, torch.nn.Embedding)
        if after and (before is False or table):
            self.found, self.embedding = self.names[id(module)], table


def first_entrance(model: PreTrainedModel, token: int) -> Entrance | None:
    """Where equal tokens become different states; None where they never do, as in any rotary, NoPE or ALiBi model."""
    watch = EntranceHook({id(module): name for name, module in model.named_modules()})
    inner = backbone(model)
    with attach(model) as probe, _watched(inner, watch):
        out = probe.forward(torch.full((1, LENGTH), token, device=input_device(model)))
        attention = {watch.names[id(module)] for module in probe.modules}
    if watch.found is None:
        return Entrance(TABLE, "added in its body") if _differs(out[0]) else None
    if watch.embedding:  # whose numbers may be sines for a rotation, which leaves the states alone
        return Entrance(TABLE, watch.found) if _differs(out[0]) else None
    return Entrance(SINKS if watch.found in attention else RECURRENT, watch.found)


def shifts(model: PreTrainedModel, module: str, token: int, by: int) -> bool:
    """Does a module's output change with the position ids alone? For a layer of the kind that reads no others."""
    outputs: list[Tensor] = []
    keep = this_thread_only(lambda _, args, out: outputs.append(next(_along_positions([out, *_values(out)]))))
    handle = model.get_submodule(module).register_forward_hook(keep)
    try:
        with attach(model) as probe:
            ids = torch.full((1, LENGTH), token, device=input_device(model))
            for start in (0, by):
                probe.forward(ids, position_ids=torch.arange(start, start + LENGTH, device=ids.device)[None])
    finally:
        handle.remove()
    still, moved = outputs
    return relative_difference(moved, still) > AGREE.of(model.dtype)


@contextmanager
def _watched(inner: torch.nn.Module, watch: EntranceHook) -> Iterator[None]:
    parts = [module for module in inner.modules() if module is not inner]
    look = this_thread_only(watch.look)
    handles = [module.register_forward_hook(look, with_kwargs=True) for module in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _values(out: Any) -> Iterator[Any]:
    yield from out.values() if hasattr(out, "values") else out if isinstance(out, (tuple, list)) else ()


def _along_positions(candidates: list[Any]) -> Iterator[Tensor]:
    """Floating tensors with exactly one axis of positions."""
    for x in candidates:
        if isinstance(x, Tensor) and x.is_floating_point() and list(x.shape).count(LENGTH) == 1:
            yield x


def _differs(x: Tensor | None) -> bool | None:
    """Do positions differ, beyond rounding? None where there are no positions."""
    if x is None:
        return None
    at = x.movedim(list(x.shape).index(LENGTH), 0).double()
    return float((at - at[:1]).abs().max()) > 1e-3 * float(at.abs().max())
