"""Stage 10, what papers say: each claim with its sentence, its test, and one rule that judges them all.

finding      an effect with its interval, the condition that it is about, and the rule of verdicts
catalogue    claims by number; a plugin adds its own
lab          one subject on the bench: runs by edit, kept and resumed
paper        the claims of arXiv 2606.06160, each beside its test
examination  every claim on one subject, into a folder

`posleak.claims` is this package and can be called: `posleak.claims(subject)`.
"""

from posleak.callable import call_as

from .catalogue import CLAIMS, Claim, Result, claim, registry
from .examination import ClaimsRun, claims, examine, examined, read_findings
from .finding import ENOUGH, Edited, Finding, Kept, Side, Verdict
from .lab import Lab

__all__ = [
    "CLAIMS",
    "ENOUGH",
    "Claim",
    "ClaimsRun",
    "Edited",
    "Finding",
    "Kept",
    "Lab",
    "Result",
    "Side",
    "Verdict",
    "claim",
    "claims",
    "examine",
    "examined",
    "read_findings",
    "registry",
]

call_as(__name__, claims)
