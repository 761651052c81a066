"""Stage 7, a question asked: named experiments that compose the earlier stages."""

from .checks import Check
from .claims import Claim, Result, examine, registry
from .doctor import Diagnosis, doctor
from .lab import Lab
from .verdicts import Finding, Side, Verdict

__all__ = [
    "Check",
    "Claim",
    "Diagnosis",
    "Finding",
    "Lab",
    "Result",
    "Side",
    "Verdict",
    "doctor",
    "examine",
    "registry",
]
