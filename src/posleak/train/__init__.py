"""Leakage in training: a callback and a monitor that measure it, and a penalty that trains against it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
