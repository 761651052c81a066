"""Eigenvalues of small symmetric matrices on one thread.

For matrices of a few hundred rows several threads are not faster, and on a busy machine they wait for each other: with
two busy processes on two cores, 0.5 ms became 7 ms, and 3 ms became 43 ms.
"""

from __future__ import annotations

import torch
from jaxtyping import Float64
from torch import Tensor


def eigenvalues(symmetric: Float64[Tensor, "*cells n n"]) -> Float64[Tensor, "*cells n"]:
    """Return the eigenvalues in increasing order, computed on the CPU."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        values: Tensor = torch.linalg.eigvalsh(symmetric.cpu())
        return values
    finally:
        torch.set_num_threads(threads)
