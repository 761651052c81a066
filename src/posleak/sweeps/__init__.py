"""Many measurements from a manifest: models × checkpoints × edits × lengths × seeds, on one machine or on Ray.

cells     a cell: one measurement, described before its model is loaded
schema    the keys of a manifest, as pydantic models
entries   the models of a manifest: revisions, folders of checkpoints, display names
manifest  a YAML file or the name of one in `named` -> cells
storage   where results are kept: a folder, or an address that fsspec opens
state     the state of a cell: finished, failed, left out, running, open
numbers   the results of a finished cell, as files next to its run
work      a worker: keeps a model in memory and measures cells one after another
progress  how far a sweep is
local     the engines on one machine
on_ray    the engine on a Ray cluster
estimate  the memory and time that cells may take
sweep     `sweep`: the public function
balance   the balance table of a sweep
collect   all cells of a storage as one table
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
