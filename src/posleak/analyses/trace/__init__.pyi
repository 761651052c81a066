from .trace import Trace as Trace
