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
"""
