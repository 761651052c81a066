"""Stage 5: rows of logits -> mask, drift, sink; powers, shares and intervals."""

from .contrast import Contrast as Contrast
from .dataset import assemble as assemble, component as component, components as components
from .observer import AttentionObserver as AttentionObserver, LeakageObserver as LeakageObserver
from .profile import narrow_layers as narrow_layers, sink_width as sink_width
from .sampled import (
    FEWEST as FEWEST,
    Estimate as Estimate,
    Jackknife as Jackknife,
    Sampled as Sampled,
    combined as combined,
)
from .split import Parts as Parts, split as split
from .summary import Summary as Summary, by_head as by_head, summarise as summarise, tidy as tidy
