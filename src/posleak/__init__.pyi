from ._version import __version__ as __version__
from .analyses.advise.effects import advise as advise
from .analyses.circuit.circuit import circuit as circuit
from .analyses.claims.examination import claims as claims
from .analyses.doctor.doctor import doctor as doctor
from .analyses.origin.origin import origin as origin
from .analyses.trace.trace import trace as trace
from .models.subject import Subject as Subject, load as load
from .reports.collected import collect as collect
from .reports.compare import compare as compare
from .reports.page import report as report
from .runs.measure import measure as measure
from .runs.run import Run as Run, split as split
from .sweeps.sweep import sweep as sweep
