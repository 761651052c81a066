"""Stage 8, what remains: self-describing run folders; atomic, verifiable, resumable."""

from .examination import ClaimsRun, claims
from .measure import default_folder, measure
from .memory import memory_plan, parse_bytes
from .run import Run
from .spec import MeasureSpec

__all__ = ["ClaimsRun", "MeasureSpec", "Run", "claims", "default_folder", "measure", "memory_plan", "parse_bytes"]
