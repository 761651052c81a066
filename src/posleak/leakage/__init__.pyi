from .contrast import Contrast as Contrast
from .dataset import assemble as assemble, component as component, components as components
from .parts import (
    LeakageObserver as LeakageObserver,
    Parts as Parts,
    log_attention_rows as log_attention_rows,
    sampled_total as sampled_total,
    split as split,
)
from .sampled import (
    MIN_PROMPTS as MIN_PROMPTS,
    Estimate as Estimate,
    Jackknife as Jackknife,
    Sampled as Sampled,
    combined as combined,
)
from .summary import (
    Summary as Summary,
    by_head as by_head,
    narrow_layers as narrow_layers,
    sink_width as sink_width,
    summarise as summarise,
    tidy as tidy,
)
