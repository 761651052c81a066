"""Stage 8, position 0: what stands there, what becomes of it, who reads it, and what that tells later tokens.

states          the residual stream at every depth; one-token sequences
closure         the state at position 0 in context against the one-token sequence
trajectory      x_0 by depth: norm, direction, massive channels, where it settles
portrait        the same for many first tokens: are they all pulled to one direction?
projection      W_O of every attention call, found without knowing the model
reading         sink-reading heads: counts, what they write, how it varies with position
fingerprint     what they write, across inputs with the same and with different first tokens
ridge, position_probe   position read off the states, before and after taking those directions out
cosines         mean cosines with intervals
context         the two forward passes of each prompt that the parts share
origin          all of it on one model
record, store   the same as JSON and arrays, and beside a run

`posleak.origin` is this package and can be called: `posleak.origin(subject)`.
"""

from posleak.callable import call_as

from .closure import Closure, closure
from .fingerprint import Fingerprint, fingerprint
from .origin import Origin, origin
from .portrait import Portrait, ordinary_tokens
from .position_probe import PositionProbe, position_probe
from .projection import Projection, projections
from .reading import EPSILON, Reading, ReadingObserver, reader_counts
from .record import OriginRecord
from .states import Alone, alone, states
from .store import StoredOrigin, read_origin, write_origin
from .trajectory import Scale, Trajectory

__all__ = [
    "EPSILON",
    "Alone",
    "Closure",
    "Fingerprint",
    "Origin",
    "OriginRecord",
    "Portrait",
    "PositionProbe",
    "Projection",
    "Reading",
    "ReadingObserver",
    "Scale",
    "StoredOrigin",
    "Trajectory",
    "alone",
    "closure",
    "fingerprint",
    "ordinary_tokens",
    "origin",
    "position_probe",
    "projections",
    "read_origin",
    "reader_counts",
    "states",
    "write_origin",
]

call_as(__name__, origin)
