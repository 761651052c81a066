"""Stage 5: rows of logits -> mask, drift, sink; powers, shares and intervals."""

from .dataset import assemble, component, components
from .observer import AttentionObserver, LeakageObserver
from .profile import narrow_layers, sink_width
from .sampled import FEWEST, Estimate, Jackknife, Sampled, combined
from .split import Parts, split
from .summary import Summary, by_head, summarise, tidy

__all__ = [
    "FEWEST",
    "AttentionObserver",
    "Estimate",
    "Jackknife",
    "LeakageObserver",
    "Parts",
    "Sampled",
    "Summary",
    "assemble",
    "by_head",
    "combined",
    "component",
    "components",
    "narrow_layers",
    "sink_width",
    "split",
    "summarise",
    "tidy",
]
