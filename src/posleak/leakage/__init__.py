"""Stage 5: rows of logits -> mask, drift, sink; powers, shares and intervals."""

from .dataset import assemble, component
from .measure import batches, measure_chunks
from .observer import AttentionObserver, LeakageObserver
from .power import Bootstrap, Estimate
from .rows import Rows, reduce_rows
from .split import Parts, split
from .summary import Summary, summarise, tidy

__all__ = [
    "AttentionObserver",
    "Bootstrap",
    "Estimate",
    "LeakageObserver",
    "Parts",
    "Rows",
    "Summary",
    "assemble",
    "batches",
    "component",
    "measure_chunks",
    "reduce_rows",
    "split",
    "summarise",
    "tidy",
]
