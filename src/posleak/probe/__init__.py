"""Stage 3, listening: the one attention function, the plan of rows, attaching and detaching, calibration."""

from .attachment import Edit, Observer, Probe, attach, body
from .calibration import Calibration, calibrate, relative_difference
from .call import Call
from .plan import Plan, default_plan
from .visibility import Visibility

__all__ = [
    "Calibration",
    "Call",
    "Edit",
    "Observer",
    "Plan",
    "Probe",
    "Visibility",
    "attach",
    "body",
    "calibrate",
    "default_plan",
    "relative_difference",
]
