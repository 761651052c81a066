"""Stage 5: rows of logits -> mask, drift, sink; powers, shares and intervals."""

from .dataset import assemble, component
from .measure import batches, measure_chunks
from .observer import AttentionObserver, LeakageObserver
from .power import Bootstrap, Estimate
from .split import Parts, split
from .summary import Summary, summarise, tidy

__all__ = [
    "AttentionObserver",
    "Bootstrap",
    "Estimate",
    "LeakageObserver",
    "Parts",
    "Summary",
    "assemble",
    "batches",
    "component",
    "measure_chunks",
    "split",
    "summarise",
    "tidy",
]
