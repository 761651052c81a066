"""Measure what the kernels of a quantised model do to activations: in every linear layer, on one forward pass.

A linear layer is linear and acts on each token alone. Kernels of quantised weights may differ: some round activations
to bfloat16 or int8, some treat outliers of one token in all tokens of a batch, and some have no gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from posleak.errors import UnsupportedError
from posleak.models import Subject
from posleak.models.hold import this_thread_only
from posleak.models.quantisation import is_quantised
from posleak.rounding import AFFINE, Tolerance, computed_in

from .calibration import relative_difference
from .native import native

BFLOAT16_ROUNDING = 2.0**-8
"""Relative rounding of bfloat16, in whose tolerance results of rounding kernels are held."""


CUT_OFF_REMEDY = "use --rank intervene, or measure the unquantised weights"


@dataclass(frozen=True)
class KernelEffects:
    """Deviations of a model's linear layers, relative to their largest output.

    rounding   |f((x + y) / 2) − (f(x) + f(y)) / 2| for the states x, y of two tokens: 0 for a linear function
    mixing     change of a token's output if the layer gets this token alone: 0 unless tokens are mixed
    """

    rounding: float
    mixing: float
    dtype: torch.dtype

    @property
    def rounds(self) -> bool:
        return self.rounding > AFFINE.of(computed_in(self.dtype))

    @property
    def mixes(self) -> bool:
        return self.mixing > AFFINE.of(computed_in(self.dtype)) / 10

    @property
    def cause(self) -> str | None:
        """The deviations as a sentence; None if there are none."""
        facts = [f"round activations, by up to {self.rounding:.1g} of the largest output"] if self.rounds else []
        if self.mixes:
            facts.append(
                f"make a token's output depend on the other tokens of its batch, by up to {self.mixing:.1g} of it"
            )
        return f"the kernels of its quantised layers {', and '.join(facts)}" if facts else None

    def explain(self, value: float, tolerance: Tolerance) -> str | None:
        """Return the cause of a difference, None if the kernels do not explain it.

        Rounding explains differences within the tolerance of bfloat16, scaled by the rounding of the kernels.
        """
        bound = tolerance.bfloat16 * max(1.0, self.rounding / BFLOAT16_ROUNDING)
        return self.cause if self.mixes or (self.rounds and value <= bound) else None


def kernel_effects(model: PreTrainedModel, ids: Int[Tensor, "B T"]) -> KernelEffects:
    """Measure the linear layers of a model with its own attention, on the last tokens of the first prompt."""
    rounding, mixing = [0.0], [0.0]

    def observe(layer: Any, args: Any, out: Any) -> None:
        if not (args and isinstance(args[0], Tensor) and args[0].dim() == 3 and args[0].shape[1] > 1):
            return
        x, y = args[0][:1, -1:], args[0][:1, -2:-1]
        f_x, f_y, between = (layer.forward(each.clone()) for each in (x, y, (x + y) / 2))
        mixing.append(relative_difference(out[:1, -1:], f_x))
        rounding.append(relative_difference(between, (f_x + f_y) / 2))

    with _hooked(model, observe):
        native(model, ids)
    return KernelEffects(max(rounding), max(mixing), model.dtype)


def rounding_dtype(subject: Subject, ids: Int[Tensor, "B T"]) -> torch.dtype:
    """Return the dtype whose tolerances results have: bfloat16 if quantised kernels deviate, else that of the model."""
    if subject.identity.quantisation is None or kernel_effects(subject.model, ids).cause is None:
        return subject.dtype
    return torch.bfloat16


@contextmanager
def gradients_required(model: PreTrainedModel) -> Iterator[None]:
    """Raise an UnsupportedError in a forward pass if the kernel of a quantised linear layer has no gradient.

    Otherwise autograd would leave out the path through that layer, without an error.
    """
    if not is_quantised(model):
        yield
        return
    names = {id(module): name for name, module in model.named_modules()}

    def check(layer: Any, args: Any, out: Any) -> None:
        name = names.pop(id(layer), None)  # each layer is checked once
        if name is not None and args[0].requires_grad and not _has_gradient(out, args[0]):
            raise UnsupportedError(
                "heads cannot be ranked by gradients: the kernel of a quantised layer has no gradient",
                where=name, got=type(layer).__name__, expected="a layer that autograd can differentiate",
                remedy=CUT_OFF_REMEDY,
            )  # fmt: skip

    with _hooked(model, check):
        yield


def _has_gradient(out: Tensor, x: Tensor) -> bool:
    try:
        return torch.autograd.grad(out.sum(), x, retain_graph=True, allow_unused=True)[0] is not None
    except RuntimeError:  # nothing requires a gradient, or an operation has none
        return False


@contextmanager
def _hooked(model: PreTrainedModel, hook: Any) -> Iterator[None]:
    """Register a forward hook on all linear layers, quantised or not, for forward passes of this thread."""
    layers = [module for module in model.modules() if hasattr(module, "in_features")]
    handles = [layer.register_forward_hook(this_thread_only(hook)) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
