"""Checks whether a model can be measured, and whether results are correct on this machine.

passes     the forward passes that the laws share; where a model writes absolute position by design
laws       the laws of docs/definitions.md, checked on one model: a measured value, its bound, and why it matters
doctor     all checks as one diagnosis
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
