"""Leakage as a differentiable scalar, to be added to the loss in training.

    loss = model(input_ids=ids, labels=ids).loss
    (loss + 0.1 * leakage(model, ids)).backward()          # a forward pass of its own

    with shared_pass(model, ids) as shared:                # on the forward pass of the loss, which costs less
        loss = model(input_ids=ids, labels=ids).loss
        (loss + 0.1 * shared.leakage()).backward()

Its value is the power that `posleak.measure` reports for the same prompts: with x_b the component of prompt b,

    P = mean over layers, heads and queries i of  Σ_δ w(δ) [ (Σ_b x_b)² − Σ_b x_b² ] / (B (B − 1))

in the norm `attention`, where w(δ) is the mean attention of the references, and the mean over all pairs (i, δ) in the
norm `even`. No prompt is multiplied by itself, so that P and its gradient are unbiased: one batch may give P < 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from transformers import PreTrainedModel

from posleak.errors import InputError, UnsupportedError, did_you_mean
from posleak.leakage.parts import call_parts, existing_pairs, log_ratio
from posleak.leakage.summary import LEADING, NORMS
from posleak.models.configs import require_decoder
from posleak.models.forms import unwrapped
from posleak.models.identity import config_sha256
from posleak.models.parallel import sharded, split_heads
from posleak.probe import Call, Placement, Plan, attach, call_rows, default_plan
from posleak.runs.placements import placements_of
from posleak.probe.plan import DEFAULT_ORIGIN
from posleak.signatures import checked

TOTAL, RESIDUAL, MASK = COMPONENTS = ("total", "residual", "mask")
"""Components whose power can be differentiated: the leakage, its drift and sink parts together, its mask part."""


@checked
def leakage(
    model: Any,
    ids: Tensor,
    part: str = TOTAL,
    norm: str = LEADING,
    *,
    constant_weights: bool = False,
    density: int = 1,
    origin: int = DEFAULT_ORIGIN,
) -> Float64[Tensor, ""]:
    """Return the power of the leakage of a batch in nats², differentiable with respect to the weights of the model.

    The model reads the batch in evaluation mode, without its language-model head. `shared_pass` saves this pass.

    model             a transformers model; wrappers of torch and peft are removed
    ids               at least two prompts without padding [B, T], each a document of its own
    part              "total", "residual" (drift and sink) or "mask"
    norm              "attention": pairs are weighted by attention; "even": every pair of query and offset counts the
                      same
    constant_weights  treat the weights of the norm "attention" as constants. Otherwise the gradient includes their
                      change, so that training can also lower the power by moving attention to position 0
    density, origin   as in `posleak.measure`

    Example: `loss = model(input_ids=ids, labels=ids).loss + 0.1 * posleak.train.leakage(model, ids)`
    """
    inner, observer = _prepared(model, ids, part, norm, constant_weights, density, origin)
    with attach(inner, [observer]) as probe:
        probe.forward(ids, grad=torch.is_grad_enabled())
    return observer.leakage()


@contextmanager
def shared_pass(
    model: Any,
    ids: Tensor,
    part: str = TOTAL,
    norm: str = LEADING,
    *,
    constant_weights: bool = False,
    density: int = 1,
    origin: int = DEFAULT_ORIGIN,
) -> Iterator[PassLeakage]:
    """Observe the forward pass of a training step on `ids`; its power is `leakage()` of the value of this context.

    The parameters are those of `leakage`. The model keeps its training mode; compiled modules run eagerly. Gradient
    checkpointing is rejected, because layers would be computed again in the backward pass.

    Example: `with shared_pass(model, ids) as shared: loss = model(input_ids=ids).loss + 0.1 * shared.leakage()`
    """
    inner, observer = _prepared(model, ids, part, norm, constant_weights, density, origin)
    if inner.training and inner.is_gradient_checkpointing:
        raise UnsupportedError(
            "the forward pass of a model with gradient checkpointing cannot be shared", where=type(inner).__name__,
            remedy="call posleak.train.leakage(model, ids), which makes a pass of its own",
        )  # fmt: skip
    with attach(inner, [observer], evaluation=False):
        yield observer


@dataclass
class PassLeakage:
    """Observer that computes the differentiable leakage of the last forward pass.

    placements   effect of positions in every call, if the part needs it
    """

    plan: Plan
    part: str
    norm: str
    constant_weights: bool
    placements: Sequence[Placement]
    _powers: list[Float64[Tensor, "H"]] = field(default_factory=list, repr=False)

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        """Compute the power of each head of a call."""
        if call.index == 0:
            self._powers = []
        if call.query.shape[2] != self.plan.length:
            raise InputError(
                "the forward pass is not of the announced prompts", where=f"layer {call.layer}",
                got=f"{call.query.shape[2]} tokens", expected=f"{self.plan.length} tokens",
                remedy="pass the same ids to shared_pass and to the model",
            )  # fmt: skip
        place = self.placements[call.index] if self.placements else None
        with torch.autocast(call.query.device.type, enabled=False):
            rows = call_rows(call, self.plan)
            exists = existing_pairs(rows)
            if self.part == TOTAL:
                x = log_ratio(rows, ~exists)
            else:
                parts = call_parts(call, self.plan, place=place)
                mask, residual = parts.mask[..., None].expand_as(parts.drift), parts.drift + parts.sink[..., None]
                x = (mask if self.part == MASK else residual).masked_fill(~exists, 0)
            square = (x.sum(0) ** 2 - (x**2).sum(0)) / (len(x) * (len(x) - 1))  # [H, Q, D]
            if self.norm == LEADING:
                weight = rows.references.by_offset(rows.offsets).mean(0)  # [H, D]
                square = square * (weight.detach() if self.constant_weights else weight)[:, None]
                exists = exists.any(-1)
            if bool(exists.any()):  # no pair is within a narrow window
                self._powers.append(square.sum((-1, -2)) / exists.sum())

    def leakage(self) -> Float64[Tensor, ""]:
        """Return the power of the last forward pass in nats²: the mean over the heads of all layers."""
        if not self._powers:
            raise InputError("no forward pass was observed", where="leakage", remedy="call the model before leakage()")
        power = torch.cat([x.to(self._powers[0].device) for x in self._powers]).mean()
        if torch.is_grad_enabled() and not power.requires_grad:
            raise UnsupportedError(
                "the leakage has no gradient", where="leakage", expected="a model with trainable weights before its "
                "last attention layer, whose pass records a graph", remedy="call requires_grad_() on its weights",
            )  # fmt: skip
        return power


def _prepared(
    model: Any, ids: Tensor, part: str, norm: str, constant_weights: bool, density: int, origin: int
) -> tuple[PreTrainedModel, PassLeakage]:
    """Return the model without wrappers, and the observer for a batch."""
    for what, value, known in (("part", part, COMPONENTS), ("norm", norm, NORMS)):
        if value not in known:
            raise InputError(f"unknown {what}", where="leakage", got=value, remedy=did_you_mean(value, known))
    if ids.ndim != 2 or len(ids) < 2:
        raise InputError(
            "the leakage of a batch needs at least two prompts: the mean of one cannot be separated from its noise",
            where="leakage", got=f"ids of shape {tuple(ids.shape)}", expected="[prompts, tokens]",
            remedy="pass two or more prompts of equal length",
        )  # fmt: skip
    plan, inner = default_plan(ids.shape[1], density, origin), unwrapped(model)
    require_decoder(type(inner).__name__, inner.config, inner.main_input_name)
    if sharded(inner) or split_heads(inner):
        raise UnsupportedError(
            "the leakage of a model that is split over processes cannot be differentiated", where=type(inner).__name__,
            expected="a model that each process has completely, as with DistributedDataParallel",
            remedy="train it with DistributedDataParallel; posleak.Monitor measures sharded models",
        )  # fmt: skip
    placements = () if part == TOTAL else _placements(inner, ids, plan)
    return inner, PassLeakage(plan, part, norm, constant_weights, placements)


_cached: WeakKeyDictionary[PreTrainedModel, dict[tuple[str, Plan], list[Placement]]] = WeakKeyDictionary()
"""Placements by config and plan: rotations do not change in training, and reading them takes a forward pass."""


def _placements(model: PreTrainedModel, ids: Int[Tensor, "B T"], plan: Plan) -> list[Placement]:
    known, key = _cached.setdefault(model, {}), (config_sha256(model.config), plan)
    if key not in known:
        known[key] = placements_of(model, ids[:1].cpu().numpy(), plan)
    return known[key]
