from .builtin import (
    BUILTIN as BUILTIN,
    DEFAULT as DEFAULT,
    Builtin as Builtin,
    Listed as Listed,
    cached as cached,
    fetch as fetch,
    listing as listing,
)
from .given import AnyModel as AnyModel, subject_of as subject_of
from .hold import exclusive as exclusive
from .identity import Identity as Identity, input_device as input_device
from .loading import load as load
from .memory import available_bytes as available_bytes, read_weights as read_weights
from .steps import checkpoints as checkpoints
from .subject import Subject as Subject
