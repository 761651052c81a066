"""Stage 3, listening: the one attention function, the plan of rows, attaching and detaching, calibration."""

from .attachment import Observer, Probe, attach, body, takes_positions
from .calibration import Calibration, calibrate, relative_difference
from .call import Call
from .edit import Edit
from .hold import exclusive
from .native import native
from .placement import Motion, Placement, read_placements
from .plan import Plan, default_plan
from .rows import Rows, call_rows, reduce_rows
from .touch import Touch, Touched
from .visibility import Visibility

__all__ = [
    "Calibration",
    "Call",
    "Edit",
    "Motion",
    "Observer",
    "Placement",
    "Plan",
    "Probe",
    "Rows",
    "Touch",
    "Touched",
    "Visibility",
    "attach",
    "body",
    "calibrate",
    "call_rows",
    "default_plan",
    "exclusive",
    "native",
    "read_placements",
    "reduce_rows",
    "relative_difference",
    "takes_positions",
]
