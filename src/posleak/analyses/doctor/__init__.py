"""Checks whether a model can be measured, and whether results are correct on this machine.

check      a measured value, its bound, and why it matters
passes     the forward passes that the laws share
laws       the laws of docs/definitions.md, checked on one model
explicit   where a model writes absolute position by design, found by observing it
doctor     all checks as one diagnosis
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
