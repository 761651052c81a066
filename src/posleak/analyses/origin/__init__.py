"""Analysis of position 0: its states by depth, the heads that read it, and what they write.

states           the residual stream at every depth; one-token sequences; law L7, closure
portrait         x_0 by depth: norm, direction, massive channels; the same for many first tokens: one direction?
reading          sink-reading heads
fingerprint      W_O of every attention call; the vectors they write, for equal and for different first tokens
position_probe   position decoded from the states, with and without those directions
context          the forward passes on prompts, shared by these analyses, and their memory plan
origin           all analyses on one model; origin.json and origin.nc in a run folder
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
