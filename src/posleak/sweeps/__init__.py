"""Many measurements from a manifest: models × checkpoints × edits × lengths × seeds, on one machine or on Ray.

cells     a cell: one measurement, described before its model is loaded; the memory and time that it may take
schema    the keys of a manifest, as pydantic models
manifest  a YAML file or the name of one in `named` -> cells; models, revisions, folders of checkpoints
storage   where results are kept: a folder, or an address that fsspec opens
state     the state of a cell (finished, failed, left out, running, open), and the progress of a sweep
numbers   the results of a finished cell, as files next to its run
work      a worker: keeps a model in memory and measures cells one after another
local     the engines on one machine
on_ray    the engine on a Ray cluster
sweep     `sweep`: the public function
collect   all cells of a storage as one table, and their balance table
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
