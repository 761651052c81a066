from .catalogue import (
    Claim as Claim,
    ClaimResult as ClaimResult,
    Finding as Finding,
    claim as claim,
    registry as registry,
)
from .examination import ClaimsRun as ClaimsRun, examine as examine
from .lab import Lab as Lab
