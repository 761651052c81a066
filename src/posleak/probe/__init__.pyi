from .attachment import (
    Collector as Collector,
    Observer as Observer,
    Probe as Probe,
    attach as attach,
    takes_positions as takes_positions,
)
from .calibration import (
    Calibration as Calibration,
    Positions as Positions,
    calibrate as calibrate,
    relative_difference as relative_difference,
)
from .call import Call as Call
from .edit import Edit as Edit, EditEffect as EditEffect, EditEffectRecorder as EditEffectRecorder
from .native import backbone as backbone
from .placement import Motion as Motion, Placement as Placement, read_placements as read_placements
from .plan import Plan as Plan, default_plan as default_plan
from .rows import Rows as Rows, call_rows as call_rows, reduce_rows as reduce_rows
from .visibility import Visibility as Visibility
