"""Forward passes of the unmodified model with its own attention: the reference for all comparisons.

`own_rotation` makes passes independent of each other: dynamic NTK scaling raises the rotary base with the largest
position of a pass and keeps the new frequencies, which are therefore reset before every pass. `runnable_experts` makes
mixtures of experts run in every dtype: torch has grouped products of all experts only in some dtypes; in the others the
experts are multiplied one after the other, with the same results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from transformers import PreTrainedModel

from posleak.errors import UnsupportedError
from posleak.models import exclusive

GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes in which torch has grouped products."""

ANY_DTYPE = (None, "eager", "batched_mm")
"""Implementations that run in every dtype. None: the model has no experts, or chooses the implementation itself."""

SETTING = "_experts_implementation_internal"

FREQUENCIES = "inv_freq"
"""Suffix of the names of buffers with rotary frequencies."""


def backbone(model: PreTrainedModel) -> torch.nn.Module:
    """Return the model without its language-model head."""
    return model.base_model


def native(
    model: PreTrainedModel, ids: Int[Tensor, "B T"], *, padding: Shaped[Tensor, "..."] | None = None, **kwargs: Any
) -> Any:
    """Run the backbone of the model on ids, without the language-model head, with exclusive use of the model."""
    mask = torch.ones_like(ids) if padding is None else padding
    with unmodified(model):
        return backbone(model)(input_ids=ids, attention_mask=mask, use_cache=False, **kwargs)


@contextmanager
def unmodified(model: PreTrainedModel) -> Iterator[None]:
    """Use the unmodified model exclusively; every pass depends only on its own positions.

    Inference mode is not used: tensors that a module creates in its first pass and keeps, such as packed weights, could
    not be used in training afterwards.
    """
    before = list(model.modules())
    with exclusive(model), runnable_experts(model), own_rotation(model, backbone(model)), torch.no_grad():
        yield
    _require_same_modules(model, before)


def _require_same_modules(model: PreTrainedModel, before: list[torch.nn.Module]) -> None:
    """Raise UnsupportedError if the model replaced its own modules, which some models do depending on prompt length."""
    replaced = {id(module) for module in model.modules()} - {id(module) for module in before}
    if replaced:
        kinds = sorted({type(module).__name__ for module in model.modules() if id(module) in replaced})
        raise UnsupportedError(
            "the model replaces its own modules permanently on a short prompt, so that results on short prompts do not "
            "apply to longer ones",
            where=type(model).__name__, got=f"new modules: {', '.join(kinds)}",
            remedy="select the attention type to be measured in config.json, if a causal one is available",
        )  # fmt: skip


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


def ungrouped(model: PreTrainedModel, dtype: torch.dtype) -> list[Any]:
    """Return the configs of expert modules whose implementation does not run in this dtype."""
    configs = {id(m.config): m.config for m in model.modules() if _holds_experts(m)}
    return (
        [] if dtype in GROUPED_DTYPES else [c for c in configs.values() if getattr(c, SETTING, None) not in ANY_DTYPE]
    )


@contextmanager
def runnable_experts(model: PreTrainedModel) -> Iterator[None]:
    """Select an expert implementation that runs in the model's current dtype."""
    before = [(config, getattr(config, SETTING)) for config in ungrouped(model, model.dtype)]
    try:
        for config, _ in before:
            setattr(config, SETTING, "eager")
        yield
    finally:
        for config, setting in before:
            setattr(config, SETTING, setting)


def _holds_experts(module: torch.nn.Module) -> bool:
    """Return whether transformers may replace the products of a module: such classes have this flag and a config."""
    return hasattr(module, "_is_expert_parallel") and hasattr(module, "config")
