"""The one measuring path: specification, loop, record and folder of a run; atomic, verifiable, resumable.

spec           the specification of a measurement, checked before a model is loaded; arguments of a call -> spec
memory         the memory planner
progress       progress inside a batch
placements     the effect of positions in every layer
loop           forward passes -> chunks of arrays
short_prompts  metrics that read short prompts of their own
loss           next-token loss
folder         the files of a run
record         run.json as dataclasses
run            a run: its record and its labelled arrays
notes          warnings about sizes and results
prepared       one measurement from its checks to its results
measure        the public function
conditions     the same prompts under several edits, each a run
balance        the main results of a run
software       versions, hashes, time and folder names

`spec`, `memory` and `software` are imported without torch, so that a wrong call is rejected at once.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
