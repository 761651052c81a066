"""Stage 11, many runs: a manifest of models × checkpoints × edits × lengths × seeds, done on one machine or on Ray.

cells     a cell: one run as it is asked for, with an id that is a hash of what decides its numbers
pieces    pieces of a manifest, each checked
entries   what stands under `models`: models, revisions, folders of checkpoints
manifest  a YAML file -> cells
storage   where results are kept: a folder, or whatever fsspec knows
state     what is known of a cell: finished, failed, left out, running, open
numbers   the numbers of a finished cell, as files beside its run
work      a worker: keeps a model in memory and does cells in turn
board     how far a sweep is
local     the engine on one machine
on_ray    the engine on a Ray cluster
estimate  what cells may take: memory and time
sweep     `sweep`: the whole of it
collect   all cells of a storage as one table

torch.
"""
