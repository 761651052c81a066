"""Leakage: the parts of rows of logits; powers and shares with intervals; contrasts with a baseline; table rows."""

from .contrast import Contrast as Contrast
from .dataset import assemble as assemble, component as component, components as components
from .observer import AttentionObserver as AttentionObserver, LeakageObserver as LeakageObserver
from .profile import narrow_layers as narrow_layers, sink_width as sink_width
from .sampled import (
    MIN_PROMPTS as MIN_PROMPTS,
    Estimate as Estimate,
    Jackknife as Jackknife,
    Sampled as Sampled,
    combined as combined,
)
from .split import Parts as Parts, split as split
from .summary import Summary as Summary, by_head as by_head, summarise as summarise, tidy as tidy
