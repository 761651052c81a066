"""The probe: the attention function with its observers and edits, the plan of rows, placements, and calibration.

Plans and the base class of edits do not import torch, so that requests are checked before it is loaded.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
