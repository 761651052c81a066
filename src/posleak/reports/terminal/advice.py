"""Tables of the settings that were tried: `posleak advise`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType

from posleak.analyses.advise.effects import ADVICE_FILE, CHANGED, PLOT_FILE
from posleak.axes import EARLY, SCALING
from posleak.runs.loss import LOSS_SPANS, LOSS_UNIT
from posleak.show.lines import prose
from posleak.show.numbers import estimate
from posleak.show.terminal import cell, table

if TYPE_CHECKING:
    from posleak.analyses.advise.effects import Advice


def advice_tables(advice: Advice) -> Iterator[RenderableType]:
    """Yield the change of leakage and of loss under every setting, then the conclusions."""
    run = advice.baseline
    yield prose(run.name, style="bold")
    yield prose(" · ".join([*run.record.model_facts, *run.record.facts]), style="dim")
    yield from _leakage(advice)
    yield from _loss(advice)
    yield prose(f"95% jackknife intervals over n = {run.prompts} prompts, paired with the baseline", style="dim")
    for sentence in advice.sentences:
        yield prose(sentence)
    for name, reason in advice.left_out.items():
        yield prose(f"left out: {name}: {reason}", style="dim")
    yield prose(
        "the sentences use simultaneous intervals for all settings (Bonferroni, 95%), which are wider; the tables show "
        "the interval of every change, also of those that are not significant", style="dim",
    )  # fmt: skip
    if run.path is not None:
        yield prose(f"runs, {ADVICE_FILE} and {PLOT_FILE} in {run.path}", style="dim")


def _leakage(advice: Advice) -> Iterator[RenderableType]:
    run = advice.baseline
    scaled = any(("all", SCALING) in effect.leakage for effect in advice.effects)
    parts = [part for part in CHANGED if part != SCALING or scaled]
    rows = table(("setting", *parts), wrap=["setting"], title="leakage")
    for effect in advice.effects:
        changes = (effect.leakage.get(("all", part)) for part in parts)
        rows.add_row(effect.setting.name, *("" if change is None else cell(change) for change in changes))
    yield rows
    power = run.summary.model["all"].power
    before = ", ".join(f"{part} {estimate(power[part])}" for part in parts if part != SCALING)
    yield prose(
        f"change of the power in nats², all queries; baseline: {before} nats²."
        + (" scaling: leakage caused by the factor on queries itself" if scaled else ""),
        style="dim",
    )


def _loss(advice: Advice) -> Iterator[RenderableType]:
    losses = advice.baseline.loss
    assert losses is not None
    where = [name for name in LOSS_SPANS if name in losses.numbers]
    rows = table(("setting", *where), wrap=["setting"], title="loss")
    for effect in advice.effects:
        rows.add_row(effect.setting.name, *(cell(effect.loss[name]) for name in where))
    yield rows
    before = ", ".join(f"{name} {estimate(loss)}" for name, loss in losses.numbers.items())
    yield prose(
        f"change in {LOSS_UNIT}, at {losses.positions} positions of each prompt; first: before position {EARLY}, end: "
        f"the last quarter; baseline: {before} {LOSS_UNIT}", style="dim",
    )  # fmt: skip
