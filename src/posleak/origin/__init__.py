"""Stage 6, position 0: what stands there, what becomes of it, who reads it, and what that tells later tokens.

states          the residual stream at every depth; one-token sequences
closure         the state at position 0 in context against the one-token sequence
trajectory      x_0 by depth: norm, direction, massive channels, where it settles
portrait        the same for many first tokens: are they all pulled to one direction?
projection      W_O of every attention call, found without knowing the model
reading         sink-reading heads: counts, what they write, how it varies with position
fingerprint     what they write, across inputs with the same and with different first tokens
ridge, position_probe   position read off the states, before and after taking those directions out
cosines, plain  mean cosines with intervals; results as JSON
context         the two forward passes of each prompt that the parts share
origin          all of it on one model
"""

from .closure import Closure, closure
from .fingerprint import Fingerprint, fingerprint
from .origin import Origin, origin
from .portrait import Portrait, ordinary_tokens
from .position_probe import PositionProbe, position_probe
from .projection import Projection, projections
from .reading import EPSILON, Reading, ReadingObserver
from .states import Alone, alone, states
from .trajectory import Scale, Trajectory

__all__ = [
    "EPSILON",
    "Alone",
    "Closure",
    "Fingerprint",
    "Origin",
    "Portrait",
    "PositionProbe",
    "Projection",
    "Reading",
    "ReadingObserver",
    "Scale",
    "Trajectory",
    "alone",
    "closure",
    "fingerprint",
    "ordinary_tokens",
    "origin",
    "position_probe",
    "projections",
    "states",
]
