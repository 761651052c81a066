"""Stage 9: can this model be measured, and are the numbers right on this machine? Checks and laws.

check      a number, the bound that it is judged by, and why it matters
bench      the forward passes that the laws share
laws       the laws of docs/definitions.md, asked of one model
explicit   where a model writes absolute position on purpose, found by watching it
doctor     all of it as one diagnosis

`posleak.doctor` is this package and can be called: `posleak.doctor(subject)`.
"""

from posleak.callable import call_as

from .check import Check, Verdict
from .doctor import Diagnosis, doctor

__all__ = ["Check", "Diagnosis", "Verdict", "doctor"]

call_as(__name__, doctor)
