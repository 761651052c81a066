"""Stage 5: rows of logits -> mask, drift, sink; powers, shares and intervals."""

from .dataset import assemble, component, components
from .measure import FORWARD, TOKENS_AT_ONCE, batches, leakage_observer, measure_chunks, observed_chunks
from .observer import AttentionObserver, LeakageObserver
from .power import Bootstrap, Estimate
from .split import Parts, split
from .summary import Summary, cancelling_layers, summarise, tidy
from .temperature import NormObserver, norms_by_position

__all__ = [
    "FORWARD",
    "TOKENS_AT_ONCE",
    "AttentionObserver",
    "Bootstrap",
    "Estimate",
    "LeakageObserver",
    "NormObserver",
    "Parts",
    "Summary",
    "assemble",
    "batches",
    "cancelling_layers",
    "component",
    "components",
    "leakage_observer",
    "measure_chunks",
    "norms_by_position",
    "observed_chunks",
    "split",
    "summarise",
    "tidy",
]
