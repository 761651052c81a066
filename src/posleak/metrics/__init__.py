"""Beside stage 5, the neighbours' measurements: what others measure of attention and states, on the same passes.

names       what `--metrics` takes, and where a meter of your own is registered
glimpse     the rows of attention that all meters look at, computed once
meter       a meter: arrays per prompt from what passes by
attention   sinks, rollout, reference frames, heads as filters;  graphs, spectra: their arithmetic
logits      ΔR², the Toeplitz deviation;  regression: its arithmetic
stream      massive activations, the compression valley, the position probe;  ridge: its arithmetic
catalogue   every metric: its definition, source, blind spots, published values
table       the numbers of a run
agreement   which metrics rank heads as leakage and its parts do

`names` is imported without torch, so that a wrong call is refused at once.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
