"""Stage 3, listening: the one attention function, the plan of rows, attaching and detaching, calibration.

Plans and the seam of edits need no torch: what is asked for is checked before it is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from posleak.lazy import lazy

if TYPE_CHECKING:
    from .attachment import Observer, Probe, attach, body, takes_positions
    from .calibration import Calibration, calibrate, relative_difference
    from .call import Call
    from .edit import Edit
    from .placement import Motion, Placement, read_placements
    from .plan import Plan, default_plan
    from .positions import Positions
    from .rows import Rows, call_rows, reduce_rows
    from .touch import Touch, Touched
    from .visibility import Visibility

__getattr__ = lazy(
    __name__,
    {
        "attachment": ("Observer", "Probe", "attach", "body", "takes_positions"),
        "calibration": ("Calibration", "calibrate", "relative_difference"),
        "call": ("Call",),
        "edit": ("Edit",),
        "placement": ("Motion", "Placement", "read_placements"),
        "plan": ("Plan", "default_plan"),
        "positions": ("Positions",),
        "rows": ("Rows", "call_rows", "reduce_rows"),
        "touch": ("Touch", "Touched"),
        "visibility": ("Visibility",),
    },
)

__all__ = [
    "Calibration",
    "Call",
    "Edit",
    "Motion",
    "Observer",
    "Placement",
    "Plan",
    "Positions",
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
    "read_placements",
    "reduce_rows",
    "relative_difference",
    "takes_positions",
]
