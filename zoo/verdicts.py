"""Verdicts of matched models on claims about architectures. Each claim compares a variant with standard RoPE.

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
class ArchitectureClaim:
    """A claim that matched models can test.

    quantity, variant   what is compared with standard RoPE
    side                whether the claim expects the variant above or below standard RoPE
    paper               whether arXiv 2606.06160 makes this claim for pretrained models
    """

    id: str
    title: str
    sentence: str
    quantity: str
    variant: str
    side: Side
    paper: bool = True

    def finding(self, table: ZooTable) -> Finding:
        """Return the effect of the variant on the training data, or the reason why there is none."""
        comparison = table.comparison(self.quantity)
        if comparison is None:
            return Finding.not_applicable(table.incomparable.get(self.quantity, "not measured"))
        effect = comparison.effect(self.variant)
        if effect is None:
            return Finding.not_applicable(comparison.left_out.get(self.variant, "the variant was not measured"))
        unit = "times" if comparison.is_ratio else f"{QUANTITIES[self.quantity].shown_unit} above standard RoPE".strip()
        return Finding.of(effect, unit, no_effect=1.0 if comparison.is_ratio else 0.0, side=self.side)


ARCHITECTURE_CLAIMS = (
    ArchitectureClaim(
        "zoo.ntk", "NTK scaling suppresses the residual", "Training with an NTK-scaled base suppresses the residual.",
        "residual", "ntk", Side.BELOW,
    ),
    ArchitectureClaim(
        "zoo.base", "A large base suppresses the residual", "Training with a large base suppresses the residual.",
        "residual", "base", Side.BELOW, paper=False,
    ),
    ArchitectureClaim(
        "zoo.window", "A window lets the residual accumulate",
        "Training with a sliding window makes the residual grow more with depth.", "slope", "window", Side.ABOVE,
    ),
    ArchitectureClaim(
        "zoo.window-first", "So does a window with position 0 visible",
        "A sliding window with position 0 always visible makes the residual grow more with depth.", "slope",
        "window-first", Side.ABOVE,
    ),
    ArchitectureClaim(
        "zoo.between", "A window increases the residual",
        "Training with a sliding window increases the residual: standard RoPE lies between it and NTK scaling.",
        "residual", "window", Side.ABOVE,
    ),
    ArchitectureClaim(
        "zoo.bos", "Without BOS, position 0 is a weaker attractor",
        "Position 0 is an attractor because the same token is always there.", "pull", "no-bos", Side.BELOW,
    ),
    ArchitectureClaim(
        "zoo.bos-sink", "Without BOS, position 0 gets less attention",
        "Attention sinks are anchored to the token at position 0.", "attention", "no-bos", Side.BELOW,
    ),
    ArchitectureClaim(
        "zoo.sink-logit", "A learned sink logit replaces the attention sink",
        "With a learned sink logit in the softmax, heads attend less to position 0.", "attention", "sink-logit",
        Side.BELOW, paper=False,
    ),
    ArchitectureClaim(
        "zoo.nope", "Without position encoding, more leakage comes from earlier masks",
        "A model without position encoding learns position from its masks, through the residual stream.", "earlier",
        "nope", Side.ABOVE, paper=False,
    ),
    ArchitectureClaim(
        "zoo.learned", "Learned position embeddings leak through the residual",
        "Learned absolute position embeddings leak through the residual stream (control of the method).", "residual",
        "learned", Side.ABOVE, paper=False,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class JudgedClaim:
    """A claim with its finding."""

    claim: ArchitectureClaim
    finding: Finding

    @property
    def verdict(self) -> Verdict:
        return self.finding.verdict if self.finding.reason is not None else self.finding.by_interval

    def as_dict(self) -> dict[str, Any]:
        return {**vars(self.claim), **vars(self.finding), "side": self.claim.side,
                "verdict": self.verdict}  # fmt: skip


def verdicts(table: ZooTable) -> list[JudgedClaim]:
    """Return every claim with its finding."""
    return [JudgedClaim(claim, claim.finding(table)) for claim in ARCHITECTURE_CLAIMS]
