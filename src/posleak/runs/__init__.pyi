from .conditions import Conditions as Conditions
from .run import Run as Run
from .spec import MeasureSpec as MeasureSpec
