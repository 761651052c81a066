"""W_O of every attention call, found by watching one forward pass: nothing here knows a model by name.

The output projection is the module whose input is what the attention function returned, with the heads laid side by
side, and which is affine. Its matrix is read by giving it the identity, so that any kind of linear layer serves:
transposed, quantised, adapted. Where something stands in between (a gate, a norm, a difference of two heads) there is
no such module, and what a head writes is measured in value space instead.

Some families normalise the projection's output before they add it to the stream. If that is a gain per channel times
one number per token, as RMSNorm is, the gain belongs to the direction that is written:  W_h v ⊙ gain. The number per
token is common to all heads of the layer and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Float, Float32, Float64, Int
from torch import Tensor
from transformers import PreTrainedModel

from posleak.models import input_device
from posleak.models.hold import exclusive, this_thread_only
from posleak.models.identity import module_device
from posleak.probe import Call, attach
from posleak.rounding import AFFINE


@dataclass(frozen=True, eq=False)
class Projection:
    """What attention call `call`, a part of layer `layer`, writes. `module` is None where W_O is not known."""

    call: int
    layer: int
    heads: int
    size: int
    name: str | None
    module: torch.nn.Module | None
    gain: Float[Tensor, "W"] | None

    @property
    def space(self) -> Literal["output", "value"]:
        return "value" if self.module is None else "output"

    def weight(self) -> Float32[Tensor, "H Ev W"]:
        """W_h, so that head h writes Σ_e v_e W_h[e]; the identity in value space, where W = Ev. On the CPU.

        It runs a module of the model: hold the model (`probe.exclusive`) where other threads may use it.
        """
        if self.module is None:
            return torch.eye(self.size).expand(self.heads, -1, -1)
        matrix, _ = affine(self.module, self.heads * self.size)
        matrix = matrix if self.gain is None else matrix * self.gain
        return matrix.view(self.heads, self.size, -1).cpu()

    @cached_property
    def gram(self) -> Float64[Tensor, "H Ev Ev"]:
        """W_h W_hᵀ: lengths and angles of what is written, from values alone."""
        weight = self.weight().double()
        return weight @ weight.mT


def affine(module: torch.nn.Module, size: int) -> tuple[Float32[Tensor, "{size} W"], Float32[Tensor, "W"]]:
    """Matrix and bias of an affine module: what it makes of the identity and of zero."""
    parameter = next(module.parameters(), torch.empty(0))
    dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
    with torch.inference_mode():
        x = torch.cat([torch.zeros(1, size), torch.eye(size)]).to(module_device(module), dtype)
        y = module(x[None])[0].float()
    return y[1:] - y[0], y[0]


@dataclass
class _Watched:
    """One attention call: what it returned, and the modules that took that, or what those made of it."""

    layer: int
    returned: Float[Tensor, "B T HEv"]  # H × Ev: the heads side by side
    shape: tuple[int, int]
    takers: list[tuple[torch.nn.Module, Tensor, Tensor]] = field(default_factory=list)
    after: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass
class _Watch:
    """Observer of attention calls and forward hook of all modules at once."""

    calls: list[_Watched] = field(default_factory=list)

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        self.calls.append(_Watched(call.layer, out.transpose(1, 2).flatten(2), (out.shape[1], out.shape[3])))

    def hook(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.calls or not args or not (isinstance(args[0], Tensor) and isinstance(output, Tensor)):
            return
        call, x = self.calls[-1], args[0]
        changed = x.shape != output.shape or not torch.equal(x, output)
        if changed and any(x.data_ptr() == y.data_ptr() and x.shape == y.shape for _, _, y in call.takers):
            call.after.append((x, output))
        elif changed and len(args) == 1 and _same(x, call.returned):
            call.takers.append((module, x, output))


def _same(x: Tensor, y: Tensor) -> bool:
    """Equal entries under any split of the leading axes."""
    return x.numel() == y.numel() and x.shape[-1] == y.shape[-1] and torch.equal(x.reshape(y.shape), y)


@contextmanager
def _hooked(model: PreTrainedModel, watch: _Watch) -> Iterator[None]:
    hook = this_thread_only(watch.hook)
    handles = [module.register_forward_hook(hook) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def projections(model: PreTrainedModel, ids: Int[Tensor, "B T"]) -> tuple[Projection, ...]:
    """One for every attention call of a forward pass; ids may be short."""
    watch = _Watch()
    with exclusive(model):
        with attach(model, [watch]) as probe, _hooked(model, watch):
            probe.forward(ids.to(input_device(model)))
        names = {id(module): name for name, module in model.named_modules()}
        return tuple(_project(index, call, names) for index, call in enumerate(watch.calls))


def _project(index: int, call: _Watched, names: dict[int, str]) -> Projection:
    heads, size = call.shape
    for module, x, y in call.takers:
        matrix, bias = affine(module, heads * size)
        gap = (x.float() @ matrix + bias - y.float()).abs().max() / y.float().abs().max()
        if gap <= AFFINE.of(y.dtype):
            return Projection(index, call.layer, heads, size, names[id(module)], module, _gain(call.after))
    return Projection(index, call.layer, heads, size, None, None, None)


def _gain(after: Sequence[tuple[Tensor, Tensor]]) -> Float32[Tensor, "W"] | None:
    """gain if what stands after the projection is y_tc = s_t gain_c x_tc; None if nothing does, or nothing such."""
    for x, y in after:
        if x.shape != y.shape:
            continue
        x, y = x.flatten(0, -2).double(), y.flatten(0, -2).double()
        s = (y / x).abs().nan_to_num(posinf=0.0).median(dim=-1, keepdim=True).values
        gain = (y * x * s).sum(0) / (x * s).square().sum(0)
        if bool(torch.isfinite(gain).all()) and float((y - s * gain * x).abs().max() / y.abs().max()) < 1e-2:
            return gain.float()
    return None
