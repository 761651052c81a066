from .circuit import Circuit as Circuit
