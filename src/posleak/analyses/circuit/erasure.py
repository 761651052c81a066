"""What remains of the leakage if the directions that carry position are erased, and what it costs in next-token loss.

    P = power of the total, summed over the layers after the first
    earlier removed = [P(T) − P(T under the edit)] / [P(T) − P(D)]

T is the ordinary run. D is branch B of the trace without lent keys, where earlier layers cannot tell position: a value
of 1 means that the edit removes as much leakage as lent keys in all layers. Each erasure has a control at the same
depths: random directions, and for LEACE random directions of the whitened states. They are drawn once for each depth,
and intervals are over prompts. All runs read the same prompts, so that differences are paired.

The loss is measured on crops of a text, because the loss on random tokens is not meaningful. The directions and means
are the same as those of the leakage, so that they are fitted on the source of the prompts, not on the text. For a model
without a tokenizer for text, the loss is measured on the prompts of the baseline instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float64

from posleak.analyses.trace.trace import Trace
from posleak.defaults import TEXT_INPUTS
from posleak.edits.base import NamedEdit
from posleak.edits.direction import CONTROLS, ERASE, LEACE, RANDOM, RANDOM_LEACE, PositionEdit
from posleak.edits.scope import Scope
from posleak.errors import InputError
from posleak.inputs import Prompts, prepare
from posleak.inputs.source import parse
from posleak.leakage import Estimate, Jackknife, Sampled
from posleak.leakage.summary import EVEN, LEADING, Products
from posleak.models import exclusive, input_device
from posleak.probe import attach
from posleak.probe.native import token_losses
from posleak.runs.conditions import Conditions
from posleak.runs.loss import loss_positions
from posleak.runs.spec import GIVEN

from .lending import later_power

ERASURES = (
    (ERASE, 1), (ERASE, 2), (ERASE, 4), (LEACE, 1), (RANDOM, 1), (RANDOM, 2), (RANDOM, 4), (RANDOM_LEACE, 1),
)  # fmt: skip
"""Methods of erasure, and numbers of directions, at every depth."""


@dataclass(frozen=True)
class Erased:
    """The effect of one edit of the residual stream.

    earlier_removed   in the leading norm, weighted by the ordinary run's attention;  even: in the norm EVEN
    left              power of the total that is left, summed over the layers after the first, in nats²
    loss_change       change of the next-token loss at the sampled positions of `loss_inputs`, in nats per token
    random            `earlier_removed` of the control, k random directions at the same depths;  random_loss: its
                      `loss_change`; None for the controls themselves
    """

    method: str
    k: int
    edit: str
    earlier_removed: Estimate
    even: Estimate
    left: Estimate
    loss_change: Estimate
    loss_inputs: str
    random: Estimate | None = None
    random_loss: Estimate | None = None

    @property
    def depths(self) -> str:
        """The depths of the edit, as in its text; empty: every depth."""
        return self.edit.partition("@")[2]

    @property
    def norms(self) -> dict[str, Estimate]:
        return {LEADING: self.earlier_removed, EVEN: self.even}


def erasure(
    conditions: Conditions, trace: Trace, text: Prompts, depths: Sequence[int] = ()
) -> tuple[tuple[Erased, ...], list[str]]:  # fmt: skip
    """Measure the effect of each erasure, or load it; also return a note for each that does not fit into memory.

    trace: of the same conditions;  text: prompts of the losses
    depths: also erase one direction at these depths only
    """
    before, rows, notes = losses(conditions, text), list[Erased](), list[str]()
    scope = Scope(tuple((first, last, None) for first, last in spans(depths)), everywhere=False)
    edits = [PositionEdit(method, k) for method, k in ERASURES]
    edits[1:1] = [PositionEdit(method, 1, scope=scope) for method in (ERASE, RANDOM) if depths]
    for edit in edits:
        try:
            rows.append(_erased(conditions, trace, edit, text, before))
        except InputError as error:
            notes.append(f"{edit.text} is left out: {error}")
    return tuple(_with_control(row, rows) for row in rows), notes


def _with_control(row: Erased, rows: Sequence[Erased]) -> Erased:
    """Return the row with the numbers of its control, if it has one among the rows."""
    wanted = CONTROLS.get(row.method), row.k, row.depths
    control = next((other for other in rows if (other.method, other.k, other.depths) == wanted), None)
    return row if control is None else replace(row, random=control.earlier_removed, random_loss=control.loss_change)


def spans(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return increasing numbers as ranges of consecutive ones: their first and last number."""
    breaks = np.flatnonzero(np.diff(numbers) > 1) + 1
    return [(int(part[0]), int(part[-1])) for part in np.split(np.asarray(numbers), breaks) if len(part)]


def _erased(
    conditions: Conditions, trace: Trace, edit: PositionEdit, text: Prompts, before: Float64[np.ndarray, "B"]
) -> Erased:
    run, ordinary = conditions.run(edit.text), trace.ordinary
    jackknife = Jackknife(ordinary.prompts)
    after, sources = run.weighted_by(ordinary)["all"].norms, trace.products["all"].norms
    removed = {norm: earlier_removed(after[norm], sources[norm], jackknife).estimate for norm in (LEADING, EVEN)}
    conditions.progress(f"loss under {edit.text}")
    change = jackknife.mean(losses(conditions, text, edit) - before).estimate
    left = _power(after[LEADING], "total", jackknife).estimate
    return Erased(
        edit.method, edit.count or 0, edit.text, removed[LEADING], removed[EVEN], left, change, text.source
    )  # fmt: skip


def loss_prompts(conditions: Conditions) -> Prompts:
    """Return crops of text as prompts; the baseline's prompts if these are text, or if the model cannot read text."""
    base, inputs = conditions.tokens, conditions.spec.inputs
    if inputs == GIVEN or type(parse(inputs)) is type(parse(TEXT_INPUTS)):
        return base
    try:
        return prepare(conditions.subject, TEXT_INPUTS, bos=base.policy, length=base.length, seed=base.seed)
    except InputError:
        return base


def losses(conditions: Conditions, prompts: Prompts, edit: NamedEdit | None = None) -> Float64[np.ndarray, "B"]:
    """Return the mean next-token loss of each prompt at the sampled positions, under an edit that the baseline fits."""
    run, at = conditions.baseline, loss_positions(conditions.spec.plan)
    model, means = run.subject.model, list[torch.Tensor]()
    edits = [] if edit is None else [edit.prepared(run.subject, run.base, conditions.spec.origin, run.fit_cache)]
    with exclusive(model), attach(model, edits=edits) as probe:
        for batch in run.spec.batches():
            ids = torch.from_numpy(prompts.batch(batch)).to(input_device(model))
            means.append(token_losses(model, probe.forward(ids), ids, at).double().mean(1).cpu())
    return torch.cat(means).numpy()


def earlier_removed(after: Products, before: Products, jackknife: Jackknife) -> Sampled:
    """Return the share of the leakage from earlier layers that an edit removes.

    after, before: products of the total under the edit, and of the sources of the trace
    """
    total = _power(before, "total", jackknife)
    removed = total - _power(after, "total", jackknife)
    return removed.over(total - _power(before, "direct", jackknife))


def _power(products: Products, component: str, jackknife: Jackknife) -> Sampled:
    return jackknife.inner(later_power(products.own[component]))
