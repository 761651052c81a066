"""Stage 6, the one measuring path: request, record, loop and folder; atomic, verifiable, resumable.

request   what a call from Python asks for: a subject, prompts, and the rest as a spec
spec      what is asked for, checked before a model is loaded
record    run.json as dataclasses
folder    files that are whole or not there
sizes     how many tensors are held at the same time
memory    what a measurement will hold, and the batch that keeps it within a limit
loop      prompts -> results batch by batch, each written as soon as it is measured
progress  how far a batch is, layer by layer
measure   one measurement from beginning to end
run       the result: a record and labelled arrays
software  with which versions, and when
balance   the whole model's shares, and how the residual changes with depth
conditions  the same prompts under many edits, each a run

`spec` is imported without torch, so that a wrong call is refused at once.
"""
