"""Metrics of attention and states from the literature, computed during the same forward passes as the leakage.

catalogue   every metric: its definition, source, blind spots, published values; names that `--metrics` accepts
meter       the base class of meters (arrays per prompt, computed during a pass) and the rows of attention they read
builtin     the meters of logits, attention and the residual stream
graphs, spectra, ridge   their arithmetic
table       the values of a run
agreement   which metrics rank heads like the leakage and its parts

`catalogue` does not import torch, so that invalid names are rejected quickly.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
