from .agreement import Agreement as Agreement
from .glimpse import Glimpse as Glimpse
from .meter import Meter as Meter, Meters as Meters
from .names import make_meters as make_meters, parse_metrics as parse_metrics, register as register
from .table import Metrics as Metrics
