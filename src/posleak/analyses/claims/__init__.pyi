from .catalogue import Claim as Claim, ClaimResult as ClaimResult, claim as claim, registry as registry
from .examination import ClaimsRun as ClaimsRun, examine as examine
from .finding import Finding as Finding
from .lab import Lab as Lab
