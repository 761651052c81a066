"""Stage 7, where position comes from: this layer's own mask, earlier layers' masks, or position 0, by intervention.

`posleak.trace` is this package and can be called: `posleak.trace(subject)`.
"""

from posleak.callable import call_as

from .trace import BORROWED, SOURCES, Ladder, Trace, trace

__all__ = ["BORROWED", "SOURCES", "Ladder", "Trace", "trace"]

call_as(__name__, trace)
