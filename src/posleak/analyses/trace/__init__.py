"""Sources of leakage, by intervention: this layer's own mask, masks of earlier layers, or position 0."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
