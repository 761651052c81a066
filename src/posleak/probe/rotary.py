"""Rotary frequencies that change during forward passes.

Dynamic NTK scaling raises the base with the largest position of a pass, and keeps the new frequencies: a shorter pass
after a longer one would use the frequencies of the longer one. `own_rotation` resets the frequencies before every pass,
so that a pass depends only on its own positions, and restores the caller's state on exit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

FREQUENCIES = "inv_freq"


@contextmanager
def own_rotation(model: PreTrainedModel, inner: torch.nn.Module) -> Iterator[None]:
    """Make every pass of `inner`, the model's backbone, independent of earlier passes. Restore all state on exit."""
    modules = [m for m in model.modules() if any(name.endswith(FREQUENCIES) for name in m._buffers)]
    before = [(module, dict(module._buffers), _values(module)) for module in modules]

    def reset(*_: Any) -> None:
        for module in modules:
            _reset(module)

    hook = inner.register_forward_pre_hook(reset)
    try:
        yield
    finally:
        hook.remove()
        for module, buffers, values in before:
            _restore(module, buffers, values)


def _values(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are numbers, or tensors that are not buffers."""
    return {name: value for name, value in vars(module).items() if isinstance(value, int | float | Tensor)}


def _restore(module: torch.nn.Module, buffers: dict[str, Tensor | None], values: dict[str, Any]) -> None:
    """Restore buffers and attributes; buffers that a user added in the meantime are kept."""
    for name in set(_values(module)) - set(values):
        delattr(module, name)
    vars(module).update(values)
    module._buffers.update(buffers)


def _reset(module: torch.nn.Module) -> None:
    """Reset frequencies that earlier passes changed. If they differ by kind of layer, that kind is a name prefix."""
    first = getattr(module, "original_max_seq_len", None)
    for name, now in tuple(module._buffers.items()):
        if not name.endswith(FREQUENCIES) or now is None:
            continue
        prefix = name.removesuffix(FREQUENCIES)
        cached, original = f"{prefix}max_seq_len_cached", getattr(module, f"{prefix}original_{FREQUENCIES}", None)
        if first is not None and original is not None and getattr(module, cached, first) > first:
            module._buffers[name] = original.to(now.device)
            setattr(module, cached, first)
