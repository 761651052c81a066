"""Metrics of attention and states from the literature, computed during the same forward passes as the leakage.

names       names that `--metrics` accepts, and the registry of meters
glimpse     the rows of attention that all meters read, computed once
meter       the base class of meters: arrays per prompt, computed during a pass
attention   sinks, rollout, reference frames, wavelets;  graphs, spectra: their arithmetic
logits      ΔR², the Toeplitz deviation
stream      massive activations, the compression valley, the position probe;  ridge: its arithmetic
catalogue   every metric: its definition, source, blind spots, published values
table       the values of a run
agreement   which metrics rank heads like the leakage and its parts

`names` does not import torch, so that invalid names are rejected quickly.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
