"""Where a model writes absolute position by design, found by observing a forward pass, for any family.

With one token repeated and no BOS, a causal model with relative positions computes the same state at every position.
Position enters at the first module that maps equal states to different ones:

    a table of positions (learned or sinusoidal), added by an embedding module or by the backbone itself
    a recurrent or convolutional layer, whose state is empty at position 0
    attention with a learned sink logit, whose weights do not sum to one
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from posleak.analyses.origin.states import hooked
from posleak.models import input_device
from posleak.probe import attach, backbone, relative_difference
from posleak.rounding import AGREE

LENGTH = 37
"""Prompt length: a prime that no other axis of a model has as its size, to recognise the axis of positions."""

TABLE, RECURRENT, SINKS = "position table", "recurrent layer", "learned sink logits"
COUNTING = "recurrent layer that reads position ids"

REASONS = {
    TABLE: "it has a table of absolute positions ({module}), which writes position into the residual stream",
    RECURRENT: "{module} carries a state from token to token that starts empty, so its output depends on position",
    COUNTING: "the recurrent layer {module} reads position ids itself, and its output changes with them",
    SINKS: "the learned sink logits of {module} take a share of attention that depends on the number of visible keys",
}


@dataclass(frozen=True)
class Entrance:
    """The first module at which position enters the residual stream other than through attention."""

    kind: str
    module: str

    @property
    def reason(self) -> str:
        return REASONS[self.kind].format(module=self.module)


@dataclass
class EntranceHook:
    """Forward hook that finds the first module whose output differs between positions although its input does not.

    names       module names by id
    module      name of the module found;  is_embedding: whether it is an embedding
    """

    names: dict[int, str]
    module: str | None = None
    is_embedding: bool = False

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if self.module is not None or any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            return  # the cosines of a rotary module are not part of the stream
        before = _differs(next(_along_positions([*args, *kwargs.values()]), None))
        after = _differs(next(_along_positions([out] if isinstance(out, Tensor) else list(_values(out))), None))
        table = isinstance(module, torch.nn.Embedding)
        if after and (before is False or table):
            self.module, self.is_embedding = self.names[id(module)], table


def first_entrance(model: PreTrainedModel, token: int) -> Entrance | None:
    """Find where equal tokens become different states; None if they never do, as in rotary, NoPE or ALiBi models."""
    hook = EntranceHook({id(module): name for name, module in model.named_modules()})
    inner = backbone(model)
    parts = (module for module in inner.modules() if module is not inner)
    with attach(model) as probe, hooked(parts, hook, with_kwargs=True):
        out = probe.forward(torch.full((1, LENGTH), token, device=input_device(model)))
        attention = {hook.names[id(module)] for module in probe.modules}
    if hook.module is None:
        return Entrance(TABLE, "added in its body") if _differs(out[0]) else None
    if hook.is_embedding:  # its values may be sines for a rotation, which does not change the states
        return Entrance(TABLE, hook.module) if _differs(out[0]) else None
    return Entrance(SINKS if hook.module in attention else RECURRENT, hook.module)


def depends_on_position_ids(model: PreTrainedModel, module: str, token: int, shift: int) -> bool:
    """Return whether the output of a module changes if all position ids are shifted and nothing else changes."""
    outputs: list[Tensor] = []

    def keep(_: torch.nn.Module, args: Any, out: Any) -> None:
        outputs.append(next(_along_positions([out, *_values(out)])))

    with hooked([model.get_submodule(module)], keep), attach(model) as probe:
        ids = torch.full((1, LENGTH), token, device=input_device(model))
        for start in (0, shift):
            probe.forward(ids, position_ids=torch.arange(start, start + LENGTH, device=ids.device)[None])
    still, moved = outputs
    return relative_difference(moved, still) > AGREE.of(model.dtype)


def _values(out: Any) -> Iterator[Any]:
    yield from out.values() if hasattr(out, "values") else out if isinstance(out, (tuple, list)) else ()


def _along_positions(candidates: list[Any]) -> Iterator[Tensor]:
    """Yield floating-point tensors with exactly one axis of positions."""
    for x in candidates:
        if isinstance(x, Tensor) and x.is_floating_point() and list(x.shape).count(LENGTH) == 1:
            yield x


def _differs(x: Tensor | None) -> bool | None:
    """Return whether positions differ by more than rounding; None without an axis of positions."""
    if x is None:
        return None
    at = x.movedim(list(x.shape).index(LENGTH), 0).double()
    return float((at - at[:1]).abs().max()) > 1e-3 * float(at.abs().max())
