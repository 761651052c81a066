"""Eigenvalues of many small symmetric matrices, on one thread.

For matrices of a few hundred rows several threads gain nothing, and on a machine that does other work too they wait for
each other: 0.5 ms became 7 ms, and 3 ms became 43 ms, beside two busy processes on two cores.
"""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor


def eigenvalues(symmetric: Float64[Tensor, "*cells n n"]) -> Float64[Tensor, "*cells n"]:
    """In increasing order; computed on the CPU."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        found: Tensor = torch.linalg.eigvalsh(symmetric.cpu())
        return found
    finally:
        torch.set_num_threads(threads)
