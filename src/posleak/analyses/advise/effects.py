"""The effect of settings on leakage and on the next-token loss, compared with the unchanged model.

Every setting is a condition on the prompts of one baseline, so changes are paired. Changes of power are in nats², and
relative to the baseline where its power is significantly above 0; changes of loss are in nats per token. Powers are
weighted by the attention of the baseline; where evenly weighted ones change in another direction, sentences say so. A
sentence says that a quantity goes up or down only if its simultaneous interval (Bonferroni over all sentences) excludes
0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posleak.analyses.claims.catalogue import ENOUGH
from posleak.axes import SCALING
from posleak.defaults import TEXT_INPUTS
from posleak.errors import InputError, NoEffectError, PosleakError, UnsupportedError, is_recoverable
from posleak.files import Sealed
from posleak.inputs import Inputs
from posleak.leakage import Estimate
from posleak.leakage.summary import EVEN, LEADING, QUERIES, PowerKey, contrasts, model_products
from posleak.models import AnyModel, subject_of
from posleak.probe.plan import DEFAULT_ORIGIN
from posleak.runs.conditions import Conditions
from posleak.runs.loss import LOSS_UNIT, loss_changes
from posleak.runs.run import Run
from posleak.show.numbers import estimate, percent
from posleak.signatures import checked
from posleak.text import one_line
from posleak.typed import plain

from .settings import GROUPS, Setting, of_edits, settings_for, usual_length

if TYPE_CHECKING:
    from posleak.show.plots import Picture

CHANGED = ("total", "mask", "residual", SCALING)
"""Components whose changes are shown; the last one only in models that scale queries by position."""

SIMULTANEOUS = ("total", "mask", "residual", "loss")
"""Quantities with simultaneous intervals."""

Change = tuple[str, str]
"""Queries and component of a changed power, such as ("all", "total")."""

MEANINGLESS = ("random", "constant")
"""Sources of tokens whose loss does not measure what a model is for."""

ADVICE_FILE, PLOT_FILE = "advice.json", "advice.png"


@dataclass(frozen=True)
class Effect:
    """The effect of one setting.

    leakage        change of the power of each component in nats², for all and for early queries: ("all", "total") …;
                   weighted by the attention of the baseline
    relative       the same divided by the baseline's power; NaN where that is not significantly above 0
    loss           change of the loss in nats per token, by part of the prompt (runs/loss.py)
    simultaneous   changes of SIMULTANEOUS (all queries, all positions), with intervals that hold jointly for all of
                   them and for all settings
    even           the same with evenly weighted powers; None in such an effect itself
    """

    setting: Setting
    leakage: dict[Change, Estimate]
    relative: dict[Change, Estimate]
    loss: dict[str, Estimate]
    simultaneous: dict[str, Estimate]
    even: Effect | None = None

    def direction(self, name: str) -> int:
        """Return the sign of a significant change: −1 down, 1 up, 0 not significant or fewer than ENOUGH prompts."""
        change = self.simultaneous[name]
        return 0 if change.n < ENOUGH else int(change.low > 0) - int(change.high < 0)

    @property
    def unchanged(self) -> bool:
        """Whether every change is exactly 0."""
        return all(change.value == change.low == change.high == 0 for change in self.simultaneous.values())

    @property
    def sentence(self) -> str:
        """The significant changes as a sentence."""
        if self.unchanged:
            return f"{self.setting.name} changes nothing: leakage and loss are bit-identical."
        share = self.relative["all", "total"].value
        relative = f", {percent(share)}" if np.isfinite(share) else ""
        words = {name: DIRECTIONS[self.direction(name)] for name in SIMULTANEOUS}
        total, loss = estimate(self.simultaneous["total"]), estimate(self.simultaneous["loss"])
        even = [
            f"{'leakage' if name == 'total' else name} {direction}: {estimate(self.even.simultaneous[name])} nats²"
            for name, direction in self.even_directions.items()
            if self.even is not None
        ]
        return (
            f"Under {self.setting.name} leakage {words['total']}: {total} nats²{relative}; mask {words['mask']}, "
            f"residual {words['residual']}. Loss {words['loss']}: {loss} {LOSS_UNIT}."
            + (f" Evenly weighted, {'; '.join(even)}." if even else "")
        )

    @property
    def even_directions(self) -> dict[str, str]:
        """The powers that change in another direction if they are evenly weighted, with that direction in words."""
        if self.even is None:
            return {}
        directions = {name: self.even.direction(name) for name in SIMULTANEOUS[:-1]}
        return {
            name: DIRECTIONS[direction] for name, direction in directions.items() if direction != self.direction(name)
        }

    @property
    def powers(self) -> dict[str, Any]:
        """The changes of powers for JSON (docs/json.md)."""
        return {"leakage": _joined(self.leakage), "relative": _joined(self.relative), "sure": self.simultaneous}


DIRECTIONS = {-1: "goes down", 0: "does not change significantly", 1: "goes up"}


@dataclass(frozen=True, repr=False)
class Advice:
    """The effects of all settings of a model; `left_out`: settings that could not be measured, with reasons."""

    baseline: Run
    effects: list[Effect]
    left_out: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Advice({self.baseline.name}: {', '.join(effect.setting.name for effect in self.effects)})"

    @property
    def has_meaningful_loss(self) -> bool:
        """Whether a loss says what a setting costs: not on random tokens, or on one token repeated."""
        return self.baseline.record.spec.inputs.partition(":")[0] not in MEANINGLESS

    @property
    def pareto_front(self) -> list[Effect]:
        """The settings that lower leakage and that no other setting dominates in leakage and loss, sorted by loss.

        It is empty if the loss is not meaningful.
        """
        lower = [effect for effect in self.effects if effect.direction("total") < 0 and self.has_meaningful_loss]
        changes = [(float(effect.leakage["all", "total"].value), float(effect.loss["all"].value)) for effect in lower]
        front = [
            (loss, effect)
            for effect, (leakage, loss) in zip(lower, changes, strict=True)
            if not any(a <= leakage and b <= loss and (a, b) != (leakage, loss) for a, b in changes)
        ]
        return [effect for _, effect in sorted(front, key=lambda pair: pair[0])]

    @property
    def sentences(self) -> list[str]:
        """Summary of all settings, grouped by the directions of leakage and loss."""
        groups = dict[tuple[int, int] | None, list[str]]()
        for effect in self.effects:
            directions = None if effect.unchanged else (effect.direction("total"), effect.direction("loss"))
            groups.setdefault(directions, []).append(effect.setting.name)
        order = (*((a, b) for a in (-1, 0, 1) for b in (-1, 0, 1)), None)
        listed = [f"{_group(pair)}: {', '.join(groups[pair])}." for pair in order if pair in groups]
        return self._headline + listed + self._even_sentences

    @property
    def _even_sentences(self) -> list[str]:
        """The settings whose effect on the leakage has another direction if powers are evenly weighted."""
        groups = dict[str, list[str]]()
        for effect in self.effects:
            if (direction := effect.even_directions.get("total")) is not None:
                groups.setdefault(direction, []).append(effect.setting.name)
        return [f"Evenly weighted, leakage {words} under: {', '.join(names)}." for words, names in groups.items()]

    @property
    def _headline(self) -> list[str]:
        losses = [effect.direction("loss") for effect in self.effects if effect.direction("total") < 0]
        if self.baseline.prompts < ENOUGH:
            return [f"{self.baseline.prompts} prompts are too few for conclusions; use {ENOUGH} or more."]
        if not self.has_meaningful_loss:
            inputs = self.baseline.record.spec.inputs
            return [f"The loss on {inputs} tokens says nothing about text: nothing is advised."]
        if not losses:
            return ["None of these settings significantly lowers leakage."]
        return [] if min(losses) <= 0 else ["Every setting that lowers leakage raises the loss."]

    def plot(self) -> Picture:
        """Plot the change of leakage against the change of loss, with intervals."""
        from posleak.show.plots import Picture, drawn, trade

        run = self.baseline
        title = f"{run.name}, n = {run.prompts}, {run.record.spec.length} tokens"
        points = [(e.setting.name, e.setting.group, e.leakage["all", "total"], e.loss["all"]) for e in self.effects]
        return Picture(drawn(lambda figure: trade(figure, points, title)), title)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of `posleak advise --json` (docs/json.md)."""
        run, record = self.baseline, self.baseline.record
        baseline = {
            norm: {"power": {name: power for name, power in numbers.power.items() if name in CHANGED}}
            for norm, numbers in run.summary.model["all"].norms.items()
        }
        document: dict[str, Any] = plain(
            {
                "model": run.name, "identity": record.identity, "inputs": record.inputs, "length": record.spec.length,
                "prompts": record.spec.prompts, "seed": record.spec.seed, "norm": LEADING,
                "baseline": {**baseline[LEADING], "loss": run.loss, EVEN: baseline[EVEN]},
                "settings": [
                    {
                        "setting": e.setting.name, "group": e.setting.group, "about": e.setting.about,
                        "edits": e.setting.edits, **e.powers, "loss": e.loss, "sentence": e.sentence,
                        EVEN: None if e.even is None else e.even.powers,
                    }
                    for e in self.effects
                ],
                "front": [effect.setting.name for effect in self.pareto_front], "sentences": self.sentences,
                "left_out": self.left_out, "units": {"leakage": "nats²", "relative": "1", "loss": LOSS_UNIT},
                "run": None if run.path is None else str(run.path),
            }
        )  # fmt: skip
        return document


def _joined(estimates: dict[Change, Estimate]) -> dict[str, Estimate]:
    """Return the estimates with the keys of the JSON: `all/total`."""
    return {"/".join(key): estimate for key, estimate in estimates.items()}


def _group(directions: tuple[int, int] | None) -> str:
    """Describe the directions of leakage and loss that a group of settings has in common."""
    if directions is None:
        return "Leakage and loss are bit-identical"
    both = {-1: "Leakage and loss both go down", 0: "Neither leakage nor loss changes significantly"}
    leakage, loss = directions
    if leakage == loss:
        return both.get(loss, "Leakage and loss both go up")
    return f"Leakage {DIRECTIONS[leakage]}, loss {DIRECTIONS[loss]}"


STORED_ADVICE = Sealed("posleak advice", 1, dict, "run `posleak advise` again")


@checked
def advise(
    subject: AnyModel,
    inputs: Inputs = TEXT_INPUTS,
    *,
    length: int | None = None,
    prompts: int | None = None,
    seed: int = 0,
    bos: str | int = "auto",
    origin: int = DEFAULT_ORIGIN,
    groups: str | Iterable[str] = GROUPS,
    edits: str | Iterable[str] = (),
    out: str | Path | None = None,
    root: str | Path | None = None,
    fresh: bool = False,
    max_memory: str | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Advice:
    """Measure which settings lower which part of the leakage without training, and their cost in loss.

    subject     a Subject, a transformers model, or anything that `load` accepts
    inputs      source of the prompts, or your own prompts, as in `measure`; preferably text of the intended application
    length      tokens per prompt (default 512, or the model's context if shorter); your own prompts are truncated to
                `length`, as in `measure`
    prompts     number of prompts to use (default 16, or all of your own prompts)
    seed        random seed for the prompts
    bos         token at position 0 of the baseline, as in `measure`
    origin      number of leading tokens treated as the origin
    groups      groups of settings to try: "bos", "window", "rope", "scale", "dtype"
    edits       additional settings: each is the text of an edit, or of several edits separated by commas
    out         folder for the runs of the baseline and of every setting, advice.json and advice.png
    root        parent of the folder if `out` is not given: results go to root/advice-MODEL-DIGEST
    fresh       discard results in the folder and measure again
    max_memory  memory limit of the process, as in `measure`
    progress    callback that receives a status line

    Example: `posleak.advise("smollm2-135m", groups="window").sentences`
    """
    own = of_edits([edits] if isinstance(edits, str) else edits)
    who = subject_of(subject, max_memory)
    if who.tokenizer is None and isinstance(inputs, str) and inputs.startswith("text:"):
        raise InputError(
            "the cost of a setting is its loss on text, which needs a tokenizer, and the model has none",
            where=who.identity.name, got=inputs, expected="a model with a tokenizer, or token ids of a text",
            remedy="pass the tokenizer with --tokenizer PATH; a loss on random tokens says nothing about text",
        )  # fmt: skip
    conditions = Conditions.of(
        who, inputs, length=length, prompts=prompts, default_length=usual_length(who), seed=seed, bos=bos,
        origin=origin, loss=True, out=out, root=root, prefix="advice-", fresh=fresh, max_memory=max_memory,
        progress=progress,
    )  # fmt: skip
    chosen = [groups] if isinstance(groups, str) else list(groups)
    with conditions.writing():
        settings = settings_for(conditions.subject, conditions.tokens, conditions.spec.length, chosen)
        advice = advised(conditions, [*settings, *own])
        if conditions.folder is not None:
            STORED_ADVICE.write(conditions.folder / ADVICE_FILE, advice.as_dict())
            advice.plot().save(conditions.folder / PLOT_FILE)
    return advice


def advised(conditions: Conditions, settings: Sequence[Setting]) -> Advice:
    """Try every setting on the baseline's prompts; unsupported ones are in `left_out`, with the reason."""
    baseline, runs, left_out = conditions.run(), dict[Setting, Run](), dict[str, str]()
    for setting in settings:
        try:
            runs[setting] = conditions.run(*setting.edits)
        except (NoEffectError, UnsupportedError) as error:
            left_out[setting.name] = error.what if error.got is None else f"{error.what} ({error.got})"
        except Exception as error:
            if isinstance(error, PosleakError) or not is_recoverable(error):
                raise
            left_out[setting.name] = f"the model raises an error: {one_line(error)}"
    level = 1 - 0.05 / (len(SIMULTANEOUS) * max(1, len(runs)))
    return Advice(baseline, [_effect(setting, run, baseline, level) for setting, run in runs.items()], left_out)


def _effect(setting: Setting, run: Run, baseline: Run, level: float) -> Effect:
    powers = model_products(run.weighted_by(baseline)), model_products(baseline.products)
    keys = {key for own in powers for key in own if key.component in CHANGED}
    zero = np.zeros_like(next(iter(powers[1].values())))  # the power of a part that one of the two runs does not have
    after, before = ({key: own.get(key, zero) for key in keys} for own in powers)
    changes = contrasts(after, before, baseline.prompts)
    losses = loss_changes(run.data, baseline.data, baseline.record.plan)

    def in_norm(norm: str, even: Effect | None = None) -> Effect:
        own = {
            (queries, part): changes[key]
            for queries in QUERIES
            for part in CHANGED
            if (key := PowerKey(norm, queries, part)) in changes
        }
        return Effect(
            setting,
            leakage={key: contrast.difference for key, contrast in own.items()},
            relative={key: contrast.relative for key, contrast in own.items()},
            loss={name: change.estimate for name, change in losses.items()},
            simultaneous={part: own["all", part].at(level).difference for part in SIMULTANEOUS[:-1]}
            | {"loss": losses["all"].at(level).estimate},
            even=even,
        )

    return in_norm(LEADING, in_norm(EVEN))
