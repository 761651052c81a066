from .agreement import Agreement as Agreement
from .catalogue import make_meters as make_meters, parse_metrics as parse_metrics, register as register
from .meter import Glimpse as Glimpse, Meter as Meter, Meters as Meters
from .table import Metrics as Metrics
