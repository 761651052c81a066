"""Stage 8, what remains: self-describing run folders; atomic, verifiable, resumable."""

from .measure import default_folder, measure
from .run import Run
from .spec import MeasureSpec

__all__ = ["MeasureSpec", "Run", "default_folder", "measure"]
