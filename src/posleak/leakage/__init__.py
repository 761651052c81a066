"""Stage 5: rows of logits -> mask, drift, sink; powers, shares and intervals."""

from .dataset import assemble, component, components
from .observer import AttentionObserver, LeakageObserver
from .sampled import Bootstrap, Estimate, Sampled, combined
from .split import Parts, split
from .summary import Summary, cancelling_layers, summarise, tidy
from .temperature import NormObserver, norms_by_position

__all__ = [
    "AttentionObserver",
    "Bootstrap",
    "Estimate",
    "LeakageObserver",
    "NormObserver",
    "Parts",
    "Sampled",
    "Summary",
    "assemble",
    "cancelling_layers",
    "combined",
    "component",
    "components",
    "norms_by_position",
    "split",
    "summarise",
    "tidy",
]
