"""Verdicts of matched models on claims about architectures: each compares a variant with standard RoPE.

Pretrained models differ in many settings. These models differ in one, start from the same weights and read the same
data, so that a difference is caused by this setting, at this size. Verdicts follow from the interval, as in `posleak
claims`. The interval is over models and uses Student's t, so that no minimum number of models is required.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from posleak.analyses.claims.catalogue import Finding, Side, Verdict

from .measuring import QUANTITIES

if TYPE_CHECKING:
    from .table import ZooTable


@dataclass(frozen=True)
class Sentence:
    """A claim that matched models can test.

    quantity, variant   compared with standard RoPE;  side: on which the claim expects the variant
    paper               whether arXiv 2606.06160 makes this claim for pretrained models
    """

    id: str
    title: str
    sentence: str
    quantity: str
    variant: str
    side: Side
    paper: bool = True

    def judged(self, table: ZooTable) -> Finding:
        """Return the finding on the training data."""
        found = table.comparison(self.quantity)
        if found is None:
            return Finding.not_applicable(table.incomparable.get(self.quantity, "not measured"))
        effect = found.effect(self.variant)
        if effect is None:
            return Finding.not_applicable(found.left_out.get(self.variant, "the variant was not measured"))
        own = {"1": ""}.get(QUANTITIES[self.quantity].unit, QUANTITIES[self.quantity].unit)
        unit = "times" if found.is_ratio else f"{own} above standard RoPE's".strip()
        return Finding.of(effect, unit, no_effect=1.0 if found.is_ratio else 0.0, side=self.side)


SENTENCES = (
    Sentence(
        "zoo.ntk", "NTK scaling suppresses the residual", "Training with an NTK-scaled base suppresses the residual.",
        "residual", "ntk", Side.BELOW,
    ),
    Sentence(
        "zoo.base", "A large base suppresses the residual", "Training with a large base suppresses the residual.",
        "residual", "base", Side.BELOW, paper=False,
    ),
    Sentence(
        "zoo.window", "A window lets the residual accumulate",
        "Training with a sliding window makes the residual grow more with depth.", "slope", "window", Side.ABOVE,
    ),
    Sentence(
        "zoo.window-first", "So does one that shows position 0",
        "A sliding window that also shows position 0 makes the residual grow more with depth.", "slope",
        "window-first", Side.ABOVE,
    ),
    Sentence(
        "zoo.between", "A window has the larger residual",
        "Training with a sliding window makes the residual larger: standard RoPE sits between it and NTK scaling.",
        "residual", "window", Side.ABOVE,
    ),
    Sentence(
        "zoo.bos", "Without BOS, position 0 pulls less",
        "Position 0 is an attractor because of the token that always stands there.", "pull", "no-bos", Side.BELOW,
    ),
    Sentence(
        "zoo.bos-sink", "Without BOS, position 0 gets less attention",
        "Attention sinks are anchored to the token at position 0.", "attention", "no-bos", Side.BELOW,
    ),
    Sentence(
        "zoo.sink-logit", "A sink logit takes the sink's place",
        "With a learned logit in the softmax, heads need position 0 less.", "attention", "sink-logit", Side.BELOW,
        paper=False,
    ),
    Sentence(
        "zoo.nope", "Without positions, more comes from earlier masks",
        "A model without position encoding learns position from its masks, through the residual stream.", "earlier",
        "nope", Side.ABOVE, paper=False,
    ),
    Sentence(
        "zoo.learned", "Learned positions leak through the residual",
        "Positions that are added to tokens leak through the residual stream; the control of the method.", "residual",
        "learned", Side.ABOVE, paper=False,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """A claim with its finding."""

    sentence: Sentence
    finding: Finding

    @property
    def verdict(self) -> Verdict:
        return self.finding.verdict if self.finding.reason is not None else self.finding.by_interval

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self.sentence), **vars(self.finding), "side": self.sentence.side,
                "verdict": self.verdict}  # fmt: skip


def verdicts(table: ZooTable) -> list[Judged]:
    """Return every claim with its finding."""
    return [Judged(sentence, sentence.judged(table)) for sentence in SENTENCES]
