"""Analysis of position 0: its states by depth, the heads that read it, and what they write.

states           the residual stream at every depth; one-token sequences; law L7, closure
directions       unit vectors, mean cosines with intervals, orthonormal bases
trajectory       x_0 by depth: norm, direction, massive channels
portrait         the same for many first tokens: do they share one direction?
projection       W_O of every attention call
reading          sink-reading heads
fingerprint      the vectors they write, for equal and for different first tokens
position_probe   position decoded from the states, with and without those directions
context          the forward passes on prompts, shared by these analyses
origin           all analyses on one model
store            origin.json and origin.nc in a run folder
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
