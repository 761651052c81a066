"""Stage 6, the one measuring path: request, record, loop and folder; atomic, verifiable, resumable.

asked     what a call from Python asks for: a subject, prompts, and the rest as a spec
spec      what is asked for, checked before a model is loaded
record    run.json as dataclasses
folder    files that are whole or not there
memory    what a measurement will hold, and the batch that keeps it within a limit
loop      prompts -> results batch by batch, each written as soon as it is measured
measure   one measurement from beginning to end
run       the result: a record and labelled arrays
conditions  the same prompts under many edits, each a run
"""

from .measure import Measurement, measure
from .memory import memory_plan, parse_bytes
from .record import DEFINITIONS_VERSION, Record
from .run import Run, split
from .spec import MeasureSpec

__all__ = [
    "DEFINITIONS_VERSION",
    "MeasureSpec",
    "Measurement",
    "Record",
    "Run",
    "measure",
    "memory_plan",
    "parse_bytes",
    "split",
]
