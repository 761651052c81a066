"""Leakage: the parts of rows of logits; powers and shares with intervals; contrasts with a baseline; table rows.

Powers and estimates do not import torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
