"""Rotary frequencies that a model moves as it reads: what one pass leaves behind must not change the next.

Dynamic NTK scaling raises the base with the largest position of a pass, and keeps what it made: a shorter pass after a
longer one would turn by the longer one's frequencies. Here every pass begins with the frequencies that the model was
built with, so that it depends on its own positions alone, and the caller gets back what he had.
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
    """Passes of `inner`, the model's body, depend on their own positions alone. On exit all is as it was."""
    modules = [m for m in model.modules() if any(name.endswith(FREQUENCIES) for name in m._buffers)]
    kept = [(module, dict(module._buffers), _plain(module)) for module in modules]

    def begin(*_: Any) -> None:
        for module in modules:
            _forget(module)

    hook = inner.register_forward_pre_hook(begin)
    try:
        yield
    finally:
        hook.remove()
        for module, buffers, plain in kept:
            _restore(module, buffers, plain)


def _plain(module: torch.nn.Module) -> dict[str, Any]:
    """Attributes that are no parts of the module: numbers, and tensors outside of its buffers."""
    return {name: value for name, value in vars(module).items() if isinstance(value, int | float | Tensor)}


def _restore(module: torch.nn.Module, buffers: dict[str, Tensor | None], plain: dict[str, Any]) -> None:
    """Only what was changed is touched: a buffer that a user put in meanwhile stays his."""
    for name in set(_plain(module)) - set(plain):
        delattr(module, name)
    vars(module).update(plain)
    module._buffers.update(buffers)


def _forget(module: torch.nn.Module) -> None:
    """Undo the growth of earlier passes; frequencies of one kind of layer have its name as a prefix."""
    first = getattr(module, "original_max_seq_len", None)
    for name, now in tuple(module._buffers.items()):
        if not name.endswith(FREQUENCIES) or now is None:
            continue
        prefix = name.removesuffix(FREQUENCIES)
        grown, original = f"{prefix}max_seq_len_cached", getattr(module, f"{prefix}original_{FREQUENCIES}", None)
        if first is not None and original is not None and getattr(module, grown, first) > first:
            module._buffers[name] = original.to(now.device)
            setattr(module, grown, first)
