"""Stage 7, a question asked: named experiments that compose the earlier stages."""

from .checks import Check
from .doctor import Diagnosis, doctor

__all__ = ["Check", "Diagnosis", "doctor"]
