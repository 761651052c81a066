"""What a setting does to leakage and to the next token's loss, beside the model as it is, on the same text.

Every setting is a condition of one baseline, on the same prompts, so that changes are paired prompt by prompt. Changes
of power are in nats², and relative to the baseline where that is clearly above 0; of loss in nats per token. Words such
as "goes down" are used where an interval that holds for all that is said together (Bonferroni) does not contain 0, and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from posleak.analyses.claims.finding import ENOUGH
from posleak.axes import SCALING
from posleak.errors import NoEffectError, PosleakError, UnsupportedError, is_recoverable
from posleak.files import Sealed
from posleak.inputs import Inputs
from posleak.leakage import Estimate
from posleak.leakage.contrast import QUERIES, PowerKey, contrasts, model_products
from posleak.models import AnyModel, subject_of
from posleak.probe.plan import DEFAULT_ORIGIN
from posleak.runs.conditions import Conditions
from posleak.runs.loss import LOSS_UNIT, loss_changes
from posleak.runs.request import resolve_request
from posleak.runs.run import Run
from posleak.runs.spec import PROMPTS
from posleak.show.numbers import estimate, percent
from posleak.signatures import checked
from posleak.text import one_line
from posleak.typed import plain

from .settings import GROUPS, Setting, of_edits, settings_for, usual_length

if TYPE_CHECKING:
    from posleak.show.plots import Picture

TEXT = "text:stdlib"
CHANGED = ("total", "mask", "residual", SCALING)
"""Parts of the leakage whose changes are shown; the last one where queries are scaled by their position."""

ADVICE_FILE, PLOT_FILE = "advice.json", "advice.png"


@dataclass(frozen=True)
class Effect:
    """What one setting does.

    leakage   change of each part's power in nats², all and early queries: ("all", "total") …
    relative  the same, divided by the baseline's power; NaN where that is not clearly above 0
    loss      change of the loss in nats per token, by part of the prompt (runs/loss.py)
    simultaneous      total, mask, residual (all queries) and loss (all positions), with intervals that hold for all of them and
              for all settings together
    """

    setting: Setting
    leakage: dict[PowerKey, Estimate]
    relative: dict[PowerKey, Estimate]
    loss: dict[str, Estimate]
    simultaneous: dict[str, Estimate]

    def direction(self, name: str) -> int:
        """−1 if what `sure` has under this name clearly goes down, 1 if it clearly goes up, 0 if neither is clear.

        Nothing is clear with fewer prompts than a verdict on a claim needs, either."""
        found = self.simultaneous[name]
        return 0 if found.n < ENOUGH else int(found.low > 0) - int(found.high < 0)

    @property
    def unchanged(self) -> bool:
        """Nothing changed, to the bit."""
        return all(found.value == found.low == found.high == 0 for found in self.simultaneous.values())

    @property
    def sentence(self) -> str:
        """What follows from the intervals, and no more."""
        if self.unchanged:
            return f"{self.setting.name} changes nothing: leakage and loss are the same to the bit."
        share = self.relative["all", "total"].value
        about = f", {percent(share)}" if np.isfinite(share) else ""
        parts = [f"{name} {DIRECTIONS[self.direction(name)]}" for name in ("mask", "residual")]
        return (
            f"Under {self.setting.name} leakage {DIRECTIONS[self.direction('total')]}: {estimate(self.simultaneous['total'])} nats²{about}"
            f"; {', '.join(parts)}. Loss {DIRECTIONS[self.direction('loss')]}: {estimate(self.simultaneous['loss'])} {LOSS_UNIT}."
        )


DIRECTIONS = {-1: "goes down", 0: "does not clearly change", 1: "goes up"}


@dataclass(frozen=True, repr=False)
class Advice:
    """All settings of a model, tried. `left_out`: settings that change nothing in it, or cannot be had, and why."""

    baseline: Run
    effects: list[Effect]
    left_out: dict[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Advice({self.baseline.name}: {', '.join(effect.setting.name for effect in self.effects)})"

    @property
    def pareto_front(self) -> list[Effect]:
        """Settings that lower leakage and that no other one beats in both leakage and loss, by their values."""
        better = [(effect, _place(effect)) for effect in self.effects if effect.direction("total") < 0]
        best = [(place[1], effect) for effect, place in better if not any(_beats(other, place) for _, other in better)]
        return [effect for _, effect in sorted(best, key=lambda pair: pair[0])]

    @property
    def sentences(self) -> list[str]:
        """What follows from the intervals for all settings together; `Effect.sentence` has it for one."""
        said, alike = list[str](), dict[tuple[int, int] | None, list[str]]()
        for effect in self.effects:
            ways = None if effect.unchanged else (effect.direction("total"), effect.direction("loss"))
            alike.setdefault(ways, []).append(effect.setting.name)
        for pair in (*((a, b) for a in (-1, 0, 1) for b in (-1, 0, 1)), None):
            if pair in alike:
                what = "Nothing changes, to the bit" if pair is None else _together(*pair)
                said.append(f"{what}: {', '.join(alike[pair])}.")
        if self.baseline.prompts < ENOUGH:
            said.insert(0, f"{self.baseline.prompts} prompts are too few to say what changes: {ENOUGH} are needed.")
        elif not any(effect.direction("total") < 0 for effect in self.effects):
            said.insert(0, "No setting that was tried clearly lowers leakage.")
        elif not any(effect.direction("total") < 0 and effect.direction("loss") <= 0 for effect in self.effects):
            said.insert(0, "Every setting that lowers leakage costs loss.")
        return said

    def plot(self) -> Picture:
        """Leakage against loss, with the intervals of both."""
        from posleak.show.plots import Picture, drawn, trade

        run = self.baseline
        title = f"{run.name}, n = {run.prompts}, {run.record.spec.length} tokens"
        points = [(e.setting.name, e.setting.group, e.leakage["all", "total"], e.loss["all"]) for e in self.effects]
        return Picture(drawn(lambda figure: trade(figure, points, title)), title)

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of `posleak advise --json` (docs/json.md)."""
        run, record = self.baseline, self.baseline.record
        found: dict[str, Any] = plain(
            {
                "model": run.name, "identity": record.identity, "inputs": record.inputs, "length": record.spec.length,
                "prompts": record.spec.prompts, "seed": record.spec.seed,
                "baseline": {
                    "power": {name: each for name, each in run.summary.model["all"].power.items() if name in CHANGED},
                    "loss": run.loss,
                },
                "settings": [
                    {
                        "setting": e.setting.name, "group": e.setting.group, "about": e.setting.about,
                        "edits": e.setting.edits, "leakage": _joined(e.leakage), "relative": _joined(e.relative),
                        "loss": e.loss, "sure": e.simultaneous, "sentence": e.sentence,
                    }
                    for e in self.effects
                ],
                "front": [effect.setting.name for effect in self.pareto_front], "sentences": self.sentences,
                "left_out": self.left_out, "units": {"leakage": "nats²", "relative": "1", "loss": LOSS_UNIT},
                "run": None if run.path is None else str(run.path),
            }
        )  # fmt: skip
        return found


def _joined(estimates: dict[PowerKey, Estimate]) -> dict[str, Estimate]:
    """Write keys as JSON has them: `all/total`."""
    return {"/".join(key): estimate for key, estimate in estimates.items()}


def _together(leakage: int, loss: int) -> str:
    alike = {-1: "Leakage and loss both go down", 0: "Neither leakage nor loss clearly changes"}
    if leakage == loss:
        return alike.get(loss, "Leakage and loss both go up")
    return f"Leakage {DIRECTIONS[leakage]}, loss {DIRECTIONS[loss]}"


STORED_ADVICE = Sealed("posleak advice", 1, dict, "start `posleak advise` again")


def _place(effect: Effect) -> tuple[float, float]:
    return float(effect.leakage["all", "total"].value), float(effect.loss["all"].value)


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] <= other[0] and one[1] <= other[1] and one != other


@checked
def advise(
    subject: AnyModel,
    inputs: Inputs = TEXT,
    *,
    length: int | None = None,
    prompts: int | None = None,
    seed: int = 0,
    bos: str | int = "auto",
    origin: int = DEFAULT_ORIGIN,
    groups: str | Iterable[str] = GROUPS,
    edits: str | Iterable[str] = (),
    out: str | Path | None = None,
    fresh: bool = False,
    max_memory: str | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Advice:
    """Which settings lower which part of the leakage on this model without training, and what they cost in loss.

    subject     a Subject, a model of transformers, or what `load` takes
    inputs      what it reads, as in `measure`; loss means most on text like what the model will read
    length      tokens per prompt: 512, or the model's context if that is shorter; prompts that you have are cut to
                it, or must be equally long
    prompts     how many: 16; of prompts that you have the first ones, or all
    seed        of the prompts
    bos         position 0 of the baseline, as in `measure`
    origin      width of the origin: how many first tokens count as it
    groups      which settings are tried: "bos", "window", "rope", "scale", "dtype"
    edits       settings of your own besides: each an edit's text, or several joined by commas
    out         a folder: the baseline and every setting as runs, advice.json and advice.png
    fresh       measure again what is in `out`
    max_memory  what the process may hold, as in `measure`
    progress    called with what is done now, in words
    """
    own = of_edits([edits] if isinstance(edits, str) else edits)
    who = subject_of(subject)
    found = resolve_request(
        who, inputs, length=length, prompts=prompts, default=(usual_length(who), PROMPTS), seed=seed, bos=bos,
        origin=origin, loss=True,
    )  # fmt: skip
    folder, say = None if out is None else Path(out), progress or (lambda what: None)
    conditions = Conditions(found.subject, found.spec, folder, fresh, max_memory, say, found.given)
    chosen = [groups] if isinstance(groups, str) else list(groups)
    with conditions.writing():
        wanted = [*settings_for(found.subject, conditions.tokens, found.spec.length, chosen), *own]
        advice = advised(conditions, wanted)
        if folder is not None:
            STORED_ADVICE.write(folder / ADVICE_FILE, advice.as_dict())
            advice.plot().save(folder / PLOT_FILE)
    return advice


def advised(conditions: Conditions, wanted: Sequence[Setting]) -> Advice:
    """Try every setting on the baseline's prompts. Left out, with the reason, is what cannot be had on this model, and
    what it breaks down under."""
    baseline, runs, left_out = conditions.run(), dict[Setting, Run](), dict[str, str]()
    for setting in wanted:
        try:
            runs[setting] = conditions.run(*setting.edits)
        except (NoEffectError, UnsupportedError) as error:
            left_out[setting.name] = _why(error)
        except Exception as error:
            if isinstance(error, PosleakError) or not is_recoverable(error):
                raise
            left_out[setting.name] = f"the model breaks down under it: {one_line(error)}"
    level = 1 - 0.05 / (len(SIMULTANEOUS) * max(1, len(runs)))
    return Advice(baseline, [_effect(setting, run, baseline, level) for setting, run in runs.items()], left_out)


SIMULTANEOUS = ("total", "mask", "residual", "loss")
"""Of what sentences may be said, for every setting."""


def _why(error: PosleakError) -> str:
    return error.what if error.got is None else f"{error.what} ({error.got})"


def _effect(setting: Setting, run: Run, baseline: Run, level: float) -> Effect:
    powers = model_products(run.products), model_products(baseline.products)
    keys = [(queries, part) for queries in QUERIES for part in CHANGED if any((queries, part) in own for own in powers)]
    zero = np.zeros_like(powers[1]["all", "total"])  # the power of a part that one of the two runs does not have
    after, before = ({key: own.get(key, zero) for key in keys} for own in powers)
    changes = contrasts(after, before, baseline.prompts)
    losses = loss_changes(run.data, baseline.data, baseline.record.plan)
    return Effect(
        setting, {key: contrast.difference for key, contrast in changes.items()},
        {key: contrast.relative for key, contrast in changes.items()},
        {name: change.estimate for name, change in losses.items()},
        {part: changes["all", part].at(level).difference for part in SIMULTANEOUS[:-1]}
        | {"loss": losses["all"].at(level).estimate},
    )  # fmt: skip
