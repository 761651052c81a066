from .origin import Origin as Origin
