from .callback import LeakageCallback as LeakageCallback
from .monitor import Monitor as Monitor
from .penalty import PassLeakage as PassLeakage, leakage as leakage, shared_pass as shared_pass
