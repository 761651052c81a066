from .builtin import (
    BUILTIN_MODELS as BUILTIN_MODELS,
    DEFAULT_MODEL as DEFAULT_MODEL,
    BuiltinModel as BuiltinModel,
    ModelListing as ModelListing,
    cached_folder as cached_folder,
    fetch as fetch,
    list_models as list_models,
)
from .hold import exclusive as exclusive
from .identity import Identity as Identity, input_device as input_device
from .memory import available_bytes as available_bytes, read_weights as read_weights
from .sources import checkpoints as checkpoints
from .subject import AnyModel as AnyModel, Subject as Subject, load as load, subject_of as subject_of
