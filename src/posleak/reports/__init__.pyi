from .compare import Comparison as Comparison
