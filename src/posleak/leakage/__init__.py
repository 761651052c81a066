"""Leakage: the parts of rows of logits; powers and shares with intervals; contrasts with a baseline; table rows."""

from .contrast import Contrast
from .dataset import assemble, component, components
from .parts import AttentionObserver, LeakageObserver, Parts, split
from .sampled import MIN_PROMPTS, Estimate, Jackknife, Sampled, combined
from .summary import Summary, by_head, narrow_layers, sink_width, summarise, tidy

__all__ = [
    "MIN_PROMPTS", "AttentionObserver", "Contrast", "Estimate", "Jackknife", "LeakageObserver", "Parts", "Sampled",
    "Summary", "assemble", "by_head", "combined", "component", "components", "narrow_layers", "sink_width", "split",
    "summarise", "tidy",
]  # fmt: skip
