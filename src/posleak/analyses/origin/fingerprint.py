"""What sink-reading heads write: W_O of every attention call, and the fingerprint W_h v_0 compared across inputs.

W_O is identified by observing one forward pass, without knowledge of model families. The output projection is the
affine module whose input is the output of the attention function, with the heads concatenated. Its matrix is read by
applying it to the identity, which works for any kind of linear layer: transposed, quantised, adapted. If there is
another operation in between (a gate, a norm, a difference of two heads), there is no such module, and what a head
writes is measured in value space.

Some families normalise the output of the projection before adding it to the stream. If the norm is a gain per channel
times one factor per token, as in RMSNorm, the gain is part of the written direction:  W_h v ⊙ gain. The factor per
token is common to all heads of the layer and is ignored.

same       1 − cos over pairs of prompts that share only their first token: 0 up to rounding (position 0 is closed)
different  mean cosine over pairs of first tokens, from one-token sequences; intervals over tokens
carried    ‖x' − x‖ / ‖x‖ in the last quarter of a prompt, by depth, if only the first token is changed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int, Int64
from torch import Tensor
from transformers import PreTrainedModel

from posleak.arrays import Array
from posleak.edits.heads import concatenated, is_output
from posleak.leakage import Estimate, Jackknife, Sampled
from posleak.models import input_device
from posleak.models.hold import exclusive
from posleak.models.identity import module_device
from posleak.models.parallel import require_whole_model
from posleak.probe import Call, attach
from posleak.rounding import AFFINE
from posleak.typed import Number

from .portrait import joined_cosines, pair_cosine, unit
from .states import WithArrays, hooked

SHOWN = 16
"""Rows and columns of the stored cosine matrices."""

FINGERPRINT_TOKENS = 256
"""First tokens whose fingerprints are compared, in addition to the reference token."""


@dataclass(frozen=True, eq=False)
class Projection:
    """The output projection of attention call `call` in layer `layer`; `module` is None if W_O is not known.

    heads, size   number of heads H and value size Ev
    name          name of the module
    gain          gain of the norm after the projection, if there is one
    """

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
        """Return W_h on the CPU: head h writes Σ_e v_e W_h[e]. In value space W_h is the identity, W = Ev.

        This runs a module of the model: hold the model (`models.exclusive`) if other threads may use it.
        """
        if self.module is None:
            return torch.eye(self.size).expand(self.heads, -1, -1)
        matrix, _ = affine(self.module, self.heads * self.size)
        matrix = matrix if self.gain is None else matrix * self.gain
        return matrix.view(self.heads, self.size, -1).cpu()

    @cached_property
    def gram(self) -> Float64[Tensor, "H Ev Ev"]:
        """W_h W_hᵀ, which gives lengths and angles of written vectors from values."""
        weight = self.weight().double()
        return weight @ weight.mT


def affine(module: torch.nn.Module, size: int) -> tuple[Float32[Tensor, "{size} W"], Float32[Tensor, "W"]]:
    """Return matrix and bias of an affine module by applying it to the identity and to zero."""
    parameter = next(module.parameters(), torch.empty(0))
    dtype = parameter.dtype if parameter.is_floating_point() else torch.float32
    with torch.inference_mode():
        x = torch.cat([torch.zeros(1, size), torch.eye(size)]).to(module_device(module), dtype)
        y = module(x[None])[0].float()
    return y[1:] - y[0], y[0]


@dataclass
class _ObservedCall:
    """One attention call.

    returned   its output [B, T, H × Ev], heads concatenated;  shape: (H, Ev)
    takers     modules that took this output, with input and output
    after      input and output of modules that took the output of a taker
    """

    layer: int
    returned: Float[Tensor, "B T HEv"]
    shape: tuple[int, int]
    takers: list[tuple[torch.nn.Module, Tensor, Tensor]] = field(default_factory=list)
    after: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass
class _ProjectionFinder:
    """Observer of attention calls and forward hook of all modules."""

    calls: list[_ObservedCall] = field(default_factory=list)

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        self.calls.append(_ObservedCall(call.layer, concatenated(out), (out.shape[1], out.shape[3])))

    def hook(self, module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self.calls or not args or not (isinstance(args[0], Tensor) and isinstance(output, Tensor)):
            return
        call, x = self.calls[-1], args[0]
        if x.shape == output.shape and torch.equal(x, output):
            return
        if any(x.data_ptr() == y.data_ptr() and x.shape == y.shape for _, _, y in call.takers):
            call.after.append((x, output))
        elif len(args) == 1 and is_output(x, call.returned):
            call.takers.append((module, x, output))


def projections(model: PreTrainedModel, ids: Int[Tensor, "B T"]) -> tuple[Projection, ...]:
    """Return the output projection of every attention call of a forward pass; short prompts are enough."""
    require_whole_model(model, "the output projection of each head")
    finder = _ProjectionFinder()
    with exclusive(model):
        with attach(model, [finder]) as probe, hooked(model.modules(), finder.hook):
            probe.forward(ids.to(input_device(model)))
        names = {id(module): name for name, module in model.named_modules()}
        return tuple(_project(index, call, names) for index, call in enumerate(finder.calls))


def _project(index: int, call: _ObservedCall, names: dict[int, str]) -> Projection:
    heads, size = call.shape
    for module, x, y in call.takers:
        matrix, bias = affine(module, heads * size)
        gap = (x.float() @ matrix + bias - y.float()).abs().max() / y.float().abs().max()
        if gap <= AFFINE.of(y.dtype):
            return Projection(index, call.layer, heads, size, names[id(module)], module, _gain(call.after))
    return Projection(index, call.layer, heads, size, None, None, None)


def _gain(after: Sequence[tuple[Tensor, Tensor]]) -> Float32[Tensor, "W"] | None:
    """Return the gain if the projection is followed by y_tc = s_t gain_c x_tc, else None."""
    for x, y in after:
        if x.shape != y.shape:
            continue
        x, y = x.flatten(0, -2).double(), y.flatten(0, -2).double()
        s = (y / x).abs().nan_to_num(posinf=0.0).median(dim=-1, keepdim=True).values
        gain = (y * x * s).sum(0) / (x * s).square().sum(0)
        if bool(torch.isfinite(gain).all()) and float((y - s * gain * x).abs().max() / y.abs().max()) < 1e-2:
            return gain.float()
    return None


@dataclass(frozen=True)
class HeadFingerprint:
    """One sink-reading head.

    same        largest 1 − cos over pairs of prompts with the same first token
    different   mean cosine over pairs of different first tokens
    """

    call: int
    head: int
    same: Number
    different: Estimate


@dataclass(frozen=True)
class SameToken:
    """The largest 1 − cos of all heads over n prompts with the same first token; None without a sink-reading head."""

    worst: float | None
    n: int


@dataclass(frozen=True)
class Fingerprint(WithArrays):
    """Fingerprints of all sink-reading heads.

    different  mean over heads of `HeadFingerprint.different`
    carried    [J]  mean over prompts of the relative difference at late positions
    changed    the first tokens of the two versions of each prompt
    matrices   [heads, SHOWN, SHOWN]  cosines among some first tokens, the reference token first; not part of the JSON
    """

    same: SameToken
    different: Estimate
    carried: Estimate
    changed: tuple[tuple[int, int], ...]
    heads: tuple[HeadFingerprint, ...]
    matrices: Array = field(default_factory=lambda: np.empty(0), repr=False)


def written(
    projection: Projection, values: Float[Tensor, "n K Ev"], heads: Sequence[int]
) -> Float64[Tensor, "{len(heads)} n W"]:
    """Return W_h v_0, including the gain that follows W_O if there is one."""
    weight, group = projection.weight().double(), projection.heads // values.shape[1]
    return torch.stack([values[:, h // group].double() @ weight[h] for h in heads])


def written_by_readers(
    projections: Sequence[Projection],
    readers: Bool[np.ndarray, "L H"],
    values: Sequence[Float[Tensor, "n _K _Ev"]],
) -> Iterator[tuple[Projection, Float64[Tensor, "_readers n _W"]]]:
    """Yield W_h v_0 of the sink-reading heads of each call that has any; `values`: v_0 for each call."""
    for projection, row, v in zip(projections, readers, values, strict=True):
        if row.any():
            yield projection, written(projection, v, np.flatnonzero(row).tolist())


def fingerprint(
    projections: Sequence[Projection],
    readers: Bool[np.ndarray, "L H"],
    same: Sequence[Float[Tensor, "prompts _K _Ev"]],
    different: Sequence[Float[Tensor, "n _K _Ev"]],
    carried: Float64[np.ndarray, "B J"],
    changed: Int64[np.ndarray, "B 2"],
) -> Fingerprint:
    """Compare the fingerprints of the sink-reading heads.

    same, different   v_0 for each call, of prompts with one first token and of n different first tokens
    carried           relative differences of each prompt
    changed           the first tokens of the two versions of each prompt
    """
    gaps, cosines, matrices = list[float](), list[Sampled](), list[Tensor]()
    jackknife = Jackknife(len(different[0]) - 1)
    for _, x in written_by_readers(projections, readers, same):
        u = unit(x)
        gaps += (1 - u @ u.mT).flatten(1).max(-1).values.tolist()
    for _, x in written_by_readers(projections, readers, different):  # one call at a time: all take much memory
        cosines += [pair_cosine(head, jackknife) for head in x[:, 1:]]
        shown = unit(x[:, :SHOWN])
        matrices += list(shown @ shown.mT)
    by_head, overall = joined_cosines(cosines, jackknife)
    return Fingerprint(
        same=SameToken(float(np.max(gaps)) if gaps else None, len(same[0])), different=overall,
        carried=Jackknife(len(carried)).mean(carried).estimate,
        changed=tuple((int(own), int(other)) for own, other in changed),
        heads=tuple(
            HeadFingerprint(projections[call].call, head, gaps[k], by_head[k])
            for k, (call, head) in enumerate(np.argwhere(readers).tolist())
        ),
        matrices=torch.stack(matrices).numpy() if matrices else np.zeros((0, 0, 0)),
    )  # fmt: skip


def carried_difference(
    x: Sequence[Float[Tensor, "B T _W"]], other: Sequence[Float[Tensor, "B T _W"]]
) -> Float64[np.ndarray, "B J={len(x)}"]:
    """Return the mean over the last quarter of positions of ‖x' − x‖ / ‖x‖, at every depth."""
    late = slice(3 * x[0].shape[1] // 4, None)
    gaps = [
        ((b[:, late].float() - a[:, late].float()).norm(dim=-1) / a[:, late].float().norm(dim=-1)).mean(-1)
        for a, b in zip(x, other, strict=True)
    ]
    return torch.stack([gap.cpu().double() for gap in gaps], dim=1).numpy()
