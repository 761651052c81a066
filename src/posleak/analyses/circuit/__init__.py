"""The circuit of absolute position: the heads that write it, the direction that carries it, the heads that read it.

lending   passes in which sets of heads attend to lent keys
ranking   order of the heads, by integrated gradients
writing   evaluation by intervention: writers, controls, readers, edges
carrier   the directions of the residual stream that carry position
erasure   what remains if these are erased
circuit   the public function and its result
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
