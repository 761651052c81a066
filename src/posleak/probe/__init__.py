"""Stage 3, listening: the one attention function, the plan of rows, attaching and detaching, calibration.

Plans and the seam of edits need no torch: what is asked for is checked before it is imported.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
