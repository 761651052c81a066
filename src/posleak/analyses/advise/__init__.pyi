from .effects import Advice as Advice, Effect as Effect
from .settings import Setting as Setting
