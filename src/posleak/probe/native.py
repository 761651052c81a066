"""The model's own computation: forward passes of the unmodified model, and the losses of its language-model head.

Passes of the unmodified model with its own attention are the reference for all comparisons.

`own_rotation` makes passes independent of each other: dynamic NTK scaling raises the rotary base with the largest
position of a pass and keeps the new frequencies, which are therefore reset before every pass. `runnable_experts` makes
mixtures of experts run in every dtype: torch has grouped products of all experts only in some dtypes; in the others the
experts are multiplied one after the other, with the same results.

`token_losses` computes the next-token loss at chosen positions. The operations between the last hidden state and the
logits (scales, soft-caps, biases) differ between families and are part of each family's forward method. Therefore the
model's own forward method runs, with its backbone replaced by a stand-in that returns states computed earlier. Logits
of the whole vocabulary exist for only a few positions at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers import PreTrainedModel

from posleak.errors import UnsupportedError
from posleak.models import exclusive
from posleak.models.parallel import gathered

LOGIT_BYTES = 128 * 10**6
"""Maximum size of float32 logits held at once, but at least one position of every prompt."""

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
    with unmodified(model):
        return run(model, ids, padding, **kwargs)


def run(model: PreTrainedModel, ids: Int[Tensor, "B T"], padding: Shaped[Tensor, "..."] | None, **kwargs: Any) -> Any:
    """Run the backbone on ids, with a mask and without a cache."""
    return called(backbone(model), ids, torch.ones_like(ids) if padding is None else padding, **kwargs)


def called(module: torch.nn.Module, ids: Int[Tensor, "B T"], mask: Shaped[Tensor, "..."], **options: Any) -> Any:
    """Call a model or its backbone, without the options that its forward method does not have."""
    parameters = signature(module.forward).parameters
    every = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    options = {"attention_mask": mask, "use_cache": False, **options}
    return module(input_ids=ids, **{name: value for name, value in options.items() if every or name in parameters})


def items_of(output: Any) -> list[Any]:
    """Return what a module returned as a list: a tensor, items of a tuple, values of a mapping, or attributes."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        return list(output.values())
    return list(output) if isinstance(output, (tuple, list)) else list(getattr(output, "__dict__", {}).values())


def states_of(output: Any) -> Float[Tensor, "B T W"]:
    """Return the first tensor of floats by prompt and position in what a backbone returned, of whatever class."""
    for x in items_of(output):
        if isinstance(x, Tensor) and x.ndim >= 3 and x.is_floating_point():
            return x
    raise UnsupportedError(
        "the model returns no states", where="forward", got=type(output).__name__,
        expected="a tensor [prompts, positions, width]: alone, first in a tuple, or in an object",
        remedy="return the hidden states or the logits of every position",
    )  # fmt: skip


@contextmanager
def unmodified(model: PreTrainedModel) -> Iterator[None]:
    """Use the unmodified model exclusively; every pass depends only on its own positions.

    Raise UnsupportedError if the model replaced its own modules.
    Inference mode is not used: tensors that a module creates in its first pass and keeps, such as packed weights, could
    not be used in training afterwards.
    """
    before = {id(module): module for module in model.modules()}
    with exclusive(model), gathered(model), runnable_experts(model), own_rotation(model), torch.no_grad():
        yield
    kinds = sorted({type(module).__name__ for module in model.modules() if id(module) not in before})
    if kinds:  # some models do this, depending on prompt length
        raise UnsupportedError(
            "the model replaces its own modules permanently on a short prompt, so that results on short prompts do not "
            "apply to longer ones",
            where=type(model).__name__, got=f"new modules: {', '.join(kinds)}",
            remedy="select the attention type to be measured in config.json, if a causal one is available",
        )  # fmt: skip


@contextmanager
def own_rotation(model: PreTrainedModel) -> Iterator[None]:
    """Make every pass of the model's backbone independent of earlier passes. Restore all state on exit."""
    modules = [m for m in model.modules() if any(name.endswith(FREQUENCIES) for name in m._buffers)]
    before = [(module, dict(module._buffers), _values(module)) for module in modules]

    def reset(*_: Any) -> None:
        """Reset frequencies that earlier passes changed. If they differ by kind of layer, it is a name prefix."""
        for module in modules:
            first = getattr(module, "original_max_seq_len", None)
            for name, now in tuple(module._buffers.items()):
                if not name.endswith(FREQUENCIES) or now is None:
                    continue
                prefix = name.removesuffix(FREQUENCIES)
                cached = f"{prefix}max_seq_len_cached"
                original = getattr(module, f"{prefix}original_{FREQUENCIES}", None)
                if first is not None and original is not None and getattr(module, cached, first) > first:
                    module._buffers[name] = original.to(now.device)
                    setattr(module, cached, first)

    try:
        with backbone(model).register_forward_pre_hook(reset):
            yield
    finally:
        for module, buffers, values in before:
            for name in set(_values(module)) - set(values):
                delattr(module, name)
            vars(module).update(values)
            module._buffers.update(buffers)  # those that a user added in the meantime are kept


def _values(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are numbers, or tensors that are not buffers."""
    return {name: value for name, value in vars(module).items() if isinstance(value, int | float | Tensor)}


def ungrouped(model: PreTrainedModel, dtype: torch.dtype) -> list[Any]:
    """Return the configs of expert modules whose implementation does not run in this dtype.

    transformers may replace the products of modules with a config and this flag.
    """
    if dtype in GROUPED_DTYPES:
        return []
    experts = [m for m in model.modules() if hasattr(m, "_is_expert_parallel") and hasattr(m, "config")]
    configs = {id(m.config): m.config for m in experts}.values()
    return [config for config in configs if getattr(config, SETTING, None) not in ANY_DTYPE]


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


def token_losses(
    model: PreTrainedModel, output: Any, ids: Int[Tensor, "B T"], positions: Sequence[int]
) -> Float[Tensor, "B P"]:
    """Compute −log p(token i + 1 | tokens up to i) in nats at positions i from the backbone's output for ids."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    at_once = max(1, LOGIT_BYTES // (4 * len(ids) * vocabulary))
    losses = []
    with torch.inference_mode():
        for first in range(0, len(positions), at_once):
            some = torch.as_tensor(positions[first : first + at_once], device=ids.device)
            logits = logits_of(model, output, ids, some).float()
            targets = ids[:, some + 1].to(logits.device)
            losses.append(logits.logsumexp(-1) - logits.gather(-1, targets[..., None])[..., 0])
    return torch.cat(losses, dim=1)


def logits_of(
    model: PreTrainedModel, output: Any, ids: Int[Tensor, "B T"], positions: Int[Tensor, " P"]
) -> Float[Tensor, "B P V"]:
    """Compute the logits at these positions with the model's own head from the backbone's output."""
    name, uses = model.base_model_prefix, list[bool]()
    inner = model._modules.get(name)
    if (own := _logits(model, output, unnamed=inner is None)) is not None:  # the backbone has its own head
        return own[:, positions]
    whole, tokens = states_of(output), ids[:, positions]
    states = whole[:, positions]
    result = _replaced(output, whole, states)
    if inner is None or inner is not model.base_model:
        raise _no_loss(model, "the model has no language-model head separate from its backbone")
    model._modules[name] = _StandIn(inner, result, uses)
    try:
        logits = _logits(model, called(model, tokens, torch.ones_like(tokens)), unnamed=True)
    finally:
        model._modules[name] = inner
    if logits is None or not uses:
        raise _no_loss(model, "the model's head does not use the output of its backbone")
    if logits.shape[:2] != states.shape[:2]:
        expected = f"{tuple(states.shape[:2])} and the vocabulary"
        raise _no_loss(model, "the model's head does not return logits for each state", tuple(logits.shape), expected)
    return logits


def _logits(model: PreTrainedModel, output: Any, *, unnamed: bool) -> Float[Tensor, "B T V"] | None:
    """Return the logits in an output; if they may be `unnamed`, also a tensor or tuple as wide as the vocabulary."""
    logits: Tensor | None = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if logits is None and unnamed and isinstance(output, (Tensor, tuple)):
        states = states_of(output)
        logits = states if states.shape[-1] == model.config.get_text_config().vocab_size else None
    return logits


def _replaced(output: Any, old: Tensor, new: Tensor) -> Any:
    """Return an output of any class with one of its tensors replaced."""
    if isinstance(output, Tensor):
        return new
    if isinstance(output, Mapping):
        return type(output)(**{name: new if value is old else value for name, value in output.items()})
    if isinstance(output, tuple):
        return tuple(new if value is old else value for value in output)
    result = copy.copy(output)
    vars(result).update({name: new for name, value in vars(output).items() if value is old})
    return result


class _StandIn(torch.nn.Module):
    """Stand-in for a model's backbone that returns `result`; all other attributes are those of the backbone.

    Some heads call a submodel of the backbone, such as `self.model.decoder`: it returns the same result.
    uses: receives an entry for every forward pass
    """

    def __init__(self, inner: torch.nn.Module, result: Any, uses: list[bool]) -> None:
        super().__init__()
        object.__setattr__(self, "inner", inner)  # not a submodule
        self.result, self.uses = result, uses

    def forward(self, *_: Any, **__: Any) -> Any:
        self.uses.append(True)
        return self.result

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            inner = getattr(object.__getattribute__(self, "inner"), name)
        return _StandIn(inner, self.result, self.uses) if isinstance(inner, PreTrainedModel) else inner


def _no_loss(model: PreTrainedModel, why: str, got: object = None, expected: object = None) -> UnsupportedError:
    what = f"the loss at chosen positions cannot be computed: {why}"
    return UnsupportedError(what, where=type(model).__name__, got=got, expected=expected, remedy="omit --loss")
