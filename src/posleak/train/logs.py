"""Results as a flat dictionary for loggers, and rules about them.

    posleak/total              power of the leakage in nats²; its interval is posleak/total_low … posleak/total_high
    posleak/mask               power of a part: mask, drift, sink, residual; of a trace also earlier, here, origin, left
    posleak/share/mask         its share of the total
    posleak/sink_attention     mean attention of late queries to position 0
    posleak/loss               mean next-token loss in nats per token, if it was requested
    posleak/layer_12/mask      the powers, shares and attention of one layer
    posleak/prompts            n;  posleak/seconds: duration of the measurement

Powers and shares are those of all queries in the leading norm, as `posleak.measure` and `posleak.trace` report them.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from posleak.errors import InputError, did_you_mean
from posleak.leakage.summary import LEADING
from posleak.show.numbers import number
from posleak.sweeps.numbers import CellResults

PREFIX = "posleak/"
LOW, HIGH = "_low", "_high"
PROMPTS, SECONDS = f"{PREFIX}prompts", f"{PREFIX}seconds"
NAMES = {
    ("power", None): "{component}", ("share", None): "share/{component}", ("attention", "position 0"): "sink_attention",
    ("loss", "all"): "loss", ("loss", None): "loss/{component}", ("metric", None): "metric/{component}",
}  # fmt: skip
"""Name of a number by its quantity and component (None: any other); other quantities have their own name."""

RELATIONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}


def flat_logs(results: CellResults, *, layers: bool = False) -> dict[str, float]:
    """Return the results as one flat dictionary, NaN where a number is not defined; `layers`: with every layer."""
    logs = {PROMPTS: float(results.run.prompts)}
    for row in results.rows():
        if row["queries"] != "early" and row["norm"] in (None, LEADING) and (layers or row["layer"] is None):
            name = _unused(_name(row), row["layer"], logs)
            logs |= {name: row["value"], f"{name}{LOW}": row["low"], f"{name}{HIGH}": row["high"]}
    return logs


def defined(logs: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers that are defined, since loggers do not expect NaN."""
    return {name: value for name, value in logs.items() if math.isfinite(value)}


def _name(row: Mapping[str, Any]) -> str:
    quantity, component = row["quantity"], row["component"]
    name = NAMES.get((quantity, component)) or NAMES.get((quantity, None), quantity)
    return name.format(component=component)


def _unused(name: str, layer: int | None, logs: Mapping[str, float]) -> str:
    """Return the key of a number; the second attention call of a layer is named as another layer: layer_12b."""
    keys = [f"{PREFIX}{name}"] if layer is None else [f"{PREFIX}layer_{layer}{call}/{name}" for call in ("", *"bcdefgh")]
    return next(key for key in keys if key not in logs)


@dataclass(frozen=True)
class Rule:
    """A rule about one number, such as `sink_attention>0.3`. `name`: its key without the prefix."""

    name: str
    relation: str
    bound: float

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read a rule; raise an InputError for anything else."""
        match = re.fullmatch(r"\s*([\w/]+)\s*(>=|<=|>|<)\s*([-+.\deE]+)\s*", text)
        try:
            if match is None:
                raise ValueError(text)
            return cls(match[1].removeprefix(PREFIX), match[2], float(match[3]))
        except ValueError:
            raise InputError(
                "not a rule", where="alert", got=repr(text), expected="a name, a relation (> >= < <=) and a number",
                remedy='pass, for example, alert="sink_attention>0.3"',
            ) from None  # fmt: skip

    def broken_by(self, logs: Mapping[str, float]) -> str | None:
        """Return a sentence if the rule applies to the whole interval of the number (to its value, without one)."""
        key = PREFIX + self.name
        if key + LOW not in logs:
            names = [name.removeprefix(PREFIX).removesuffix(LOW) for name in logs if name.endswith(LOW)]
            raise InputError(
                "a rule is about a number that is not measured", where="alert", got=self.name,
                remedy=did_you_mean(self.name, names) + "; numbers of layers need layers=True",
            )  # fmt: skip
        value, low, high = (logs[key + end] for end in ("", LOW, HIGH))
        near = low if self.relation.startswith(">") else high
        if not RELATIONS[self.relation](value if math.isnan(near) else near, self.bound):
            return None
        interval = "" if math.isnan(low) else f" ({number(low)} … {number(high)})"
        return f"{self.name} is {number(value)}{interval}: {self.name}{self.relation}{self.bound:g}"


def parse_rules(rules: str | Iterable[str]) -> tuple[Rule, ...]:
    """Read one or several rules."""
    return tuple(map(Rule.parse, [rules] if isinstance(rules, str) else rules))
