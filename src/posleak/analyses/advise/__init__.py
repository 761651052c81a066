"""Advice for engineers: which settings lower which part of the leakage without training, and their cost in loss.

settings  the settings that are tried on a model: first token, windows, rotations, logits, dtype
effects   measures each setting against the baseline on the same prompts, and states what changes
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
