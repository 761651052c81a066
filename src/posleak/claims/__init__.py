"""Stage 10, what papers say: each claim with its sentence, its test, and one rule that judges them all.

finding      an effect with its interval, the condition that it is about, and the rule of verdicts
catalogue    claims by number; a plugin adds its own
lab          one subject on the bench: runs by edit, kept and resumed
papers       the claims of each paper (posleak.papers), each beside its test
examination  every claim of a paper on one subject, into a folder

`posleak.claims` is this package and can be called: `posleak.claims(subject)`.
"""

from posleak.callable import call_as
from posleak.papers import PAPERS, Paper

from .catalogue import CLAIMS, Claim, Result, claim, registry
from .examination import ClaimsRun, claims, examine, examined, read_findings
from .finding import ENOUGH, Edited, Finding, Kept, Side, Verdict
from .lab import Lab

__all__ = [
    "CLAIMS",
    "ENOUGH",
    "PAPERS",
    "Claim",
    "ClaimsRun",
    "Edited",
    "Finding",
    "Kept",
    "Lab",
    "Paper",
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
