"""Rank heads by integrated gradients: how much of the leakage of later layers each head writes.

Give all heads the same share x of lent keys (probe/lending.py). With P the power of the total, summed over the layers
after the first, the attribution of head h is

    a_h = − ∫ ∂P/∂α_h dx  at α = (x, …, x), x from 0 to 1,   Σ_h a_h = P(no head) − P(all heads)

with Gauss-Legendre nodes. P is quadratic in the totals t_b of the prompts, without terms of one prompt with itself. Its
derivative is that of Σ_b g_b · t_b with g_b = 2 w (Σ_c t_c − t_b) / (n (n − 1)): a first pass computes the totals of
all prompts, a second one the derivatives, batch by batch.

Attributions only order the heads. The reported shares are measured by intervention on other prompts (writing.py).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Float64
from numpy.polynomial.legendre import leggauss
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from posleak.arrays import Array
from posleak.defaults import NODES
from posleak.edits.context import LendByHead
from posleak.errors import UnsupportedError
from posleak.models import exclusive
from posleak.probe import Collector, Probe, attach
from posleak.probe.attachment import decoder_layers
from posleak.probe.kernels import gradients_required
from posleak.typed import Number

from .lending import NO_HEAD, TOKENS_WITH_GRAPH, LendingPasses, LendingStudy, total_of_copies

GRADIENTS, INTERVENE = METHODS = ("gradients", "intervene")
"""Rank by integrated gradients, or by lending in every head alone."""


@dataclass(frozen=True)
class Ranking:
    """An order of the heads by attribution.

    method        GRADIENTS or INTERVENE
    heads         attribution of each head, in nats² of P [L, H]; NaN where a head does not exist
    truth         P(no head) − P(all heads) on the same prompts, which `sum` approximates
    prompts       number of prompts;  nodes: number of integration nodes, 0 for INTERVENE
    overlap       by k: share of the first k heads that the compared ranking has among its first k
    correlation   rank correlation (Spearman) with the attributions of the compared ranking, over heads
    """

    method: str
    heads: Array
    truth: Number
    prompts: int
    nodes: int
    overlap: dict[int, Number] = field(default_factory=dict)
    correlation: Number = math.nan

    @property
    def sum(self) -> float:
        """The sum of the attributions."""
        return float(np.nansum(self.heads))

    @property
    def error(self) -> float:
        """The difference between sum and truth, as a share of the truth."""
        return self.sum / self.truth - 1 if self.truth else math.nan

    @property
    def order(self) -> list[tuple[int, int]]:
        """The heads (call, head), largest attribution first."""
        flat = np.argsort(-np.nan_to_num(self.heads, nan=-np.inf), axis=None, kind="stable")
        order = [divmod(int(at), self.heads.shape[1]) for at in flat]
        return [(call, head) for call, head in order if np.isfinite(self.heads[call, head])]

    def compared(self, other: Ranking, sizes: Iterable[int]) -> Ranking:
        """Return the ranking with its overlap and rank correlation with another one of the same heads."""
        from scipy.stats import spearmanr

        exists = np.isfinite(self.heads)
        overlap = {k: len(set(self.order[:k]) & set(other.order[:k])) / k for k in sizes}
        correlation = spearmanr(self.heads[exists], other.heads[exists]).statistic if exists.sum() > 2 else math.nan
        return replace(self, overlap=overlap, correlation=float(correlation))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON form, with `sum` and `error`."""
        return {**vars(self), "sum": self.sum, "error": self.error}


def weights(totals: Float64[np.ndarray, "B L H Q D"], by_offset: Float64[np.ndarray, "B L H D"]) -> Array:
    """Return the weights w [L, H, Q, D] with which squared means of totals add up to P, in the leading norm.

    by_offset: attention of references by offset
    """
    exists = np.isfinite(totals[0])
    queries, heads = exists.any(-1).sum(-1), exists.any((-1, -2)).sum(-1)  # [L, H], [L]
    with np.errstate(invalid="ignore", divide="ignore"):
        w = exists * by_offset.mean(0)[:, :, None] / queries[..., None, None] / heads[:, None, None, None]
    w = np.nan_to_num(w)
    w[0] = 0  # the first layer
    return np.asarray(w)


def power(totals: Float64[np.ndarray, "B L H Q D"], w: Float64[np.ndarray, "L H Q D"]) -> float:
    """Return P: the weighted unbiased square of the mean total."""
    t, n = np.nan_to_num(totals), len(totals)
    return float((w * (t.sum(0) ** 2 - (t**2).sum(0))).sum() / (n * (n - 1)))


def rank(
    passes: LendingPasses, progress: Callable[[str], None], *, nodes: int = NODES, keep_graph: bool = True
) -> Ranking:
    """Rank the heads by integrated gradients.

    keep_graph: keep the whole graph of a pass; otherwise every layer is computed again in the backward pass
    """
    x, node_weights = leggauss(nodes)
    x, node_weights = (x + 1) / 2, node_weights / 2
    shape = len(passes.heads), max(passes.heads)
    share = torch.from_numpy(x).float()[:, None, None].expand(-1, *shape).clone()
    ends = torch.stack([torch.zeros(shape), torch.ones(shape)])
    totals = passes.totals(torch.cat([ends, share]), lambda line: progress(f"ranking, totals: {line}"))
    w = weights(totals[:, 0], passes.weight().values)
    truth = power(totals[:, 0], w) - power(totals[:, 1], w)
    at_nodes, n = np.nan_to_num(totals[:, 2:]), len(totals)
    cotangent = (
        2 * w * node_weights[:, None, None, None, None] * (at_nodes.sum(0) - at_nodes) / (n * (n - 1))
    )  # [B, C, L, H, Q, D]
    gradient = derivatives(passes, share, cotangent, progress, keep_graph=keep_graph)
    exists = np.arange(shape[1]) < np.array(passes.heads)[:, None]
    return Ranking(GRADIENTS, np.where(exists, -gradient.sum(0), np.nan), truth, n, nodes)


def rank_by_intervention(study: LendingStudy) -> Ranking:
    """Rank the heads by lending in every head alone: P(no head) − P(the head)."""
    passes, every = study.passes, study.passes.every_head
    study = replace(study, weight=passes.weight(), digest=f"{study.digest}, ranking of {passes.indices}")
    study.measure([NO_HEAD, every, *(frozenset([head]) for head in sorted(every))], "ranking")
    heads = np.full((len(passes.heads), max(passes.heads)), np.nan)
    for head in every:
        heads[head] = study.removed(frozenset([head]))[0].value
    return Ranking(INTERVENE, heads, float(study.removed(every)[0].value), len(passes.indices), 0)


def derivatives(
    passes: LendingPasses,
    share: Float[Tensor, "C L H"],
    cotangent: Float64[np.ndarray, "B C L H Q D"],
    progress: Callable[[str], None],
    *,
    keep_graph: bool = True,
) -> Float64[np.ndarray, "C L H"]:
    """Return the derivative of Σ cotangent · total with respect to the shares."""
    share = share.clone().requires_grad_()
    edit, collector = LendByHead(share, passes.apart), Collector(partial(total_of_copies, plan=passes.plan))
    gradient, model = torch.zeros_like(share, dtype=torch.float64), passes.subject.model
    with ExitStack() as stack:
        stack.enter_context(exclusive(model))
        stack.enter_context(frozen_weights(model))
        probe = stack.enter_context(attach(model, [collector], [*passes.edits, edit]))
        stack.enter_context(gradients_required(model))
        if not keep_graph:
            stack.enter_context(recomputing(probe))
        for batch, ids in passes.batches_after_donor(edit, min(TOKENS_WITH_GRAPH, passes.tokens)):
            progress(f"ranking, gradients: prompts {batch.start + 1} to {batch.stop} of {len(passes.indices)}")
            collector.keep = True
            probe.forward(ids, grad=True)
            collector.keep = False
            g = torch.from_numpy(cotangent[batch.start : batch.stop]).flatten(0, 1)  # [BC, L, H, Q, D]
            layers = enumerate(collector.collect())
            objective = sum((x.nan_to_num() * g[:, call, : x.shape[1]].to(x)).sum().to(share) for call, x in layers)
            gradient += differentiated(cast("Tensor", objective), share, passes.subject.identity.name)
    return gradient.numpy()


def differentiated(objective: Tensor, share: Float[Tensor, "C L H"], name: str) -> Float64[Tensor, "C L H"]:
    """Return the derivative; raise an UnsupportedError if the model computes with operations that have none."""
    try:
        return torch.autograd.grad(objective, share)[0].double()
    except RuntimeError as error:
        if not any(word in str(error) for word in ("grad", "derivative", "autograd")):
            raise
        raise UnsupportedError(
            "heads cannot be ranked by gradients: the model uses an operation without a gradient, such as a kernel for "
            "packed weights", where=name, got=str(error).splitlines()[0], remedy="use --rank intervene",
        ) from error  # fmt: skip


@contextmanager
def frozen_weights(model: PreTrainedModel) -> Iterator[None]:
    """Switch gradients of the weights off: only derivatives with respect to shares are needed."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def recomputing(probe: Probe) -> Iterator[None]:
    """Keep the inputs of decoder layers only, and compute each layer again in the backward pass."""
    layers = decoder_layers(probe.model)
    replaced = [vars(layer).get("forward") for layer in layers]  # by accelerate, for example

    def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            first = probe.calls

            def again(*args: Any) -> Any:
                probe.calls = first
                probe.hold.thread = threading.current_thread()  # autograd may use a thread of its own
                return forward(*args, **kwargs)

            return checkpoint(again, *args, use_reentrant=False)

        return run

    try:
        for layer in layers:
            layer.forward = checkpointed(layer.forward)
        yield
    finally:
        for layer, forward in zip(layers, replaced, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward
