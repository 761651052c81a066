"""What it costs: posleak against the plain forward pass and against its peers, in one run.

statistics  what every contestant computes, and how far two are apart
cases       the contestants
worker      peak memory, each in a process of its own
timing      interleaved repeats, medians and ratios
contest     all of it, length by length
"""

from .cases import CASES, Case
from .contest import LENGTHS, PEERS_UP_TO, REPEATS, Benchmark, Result, bench, chosen_cases

__all__ = ["CASES", "LENGTHS", "PEERS_UP_TO", "REPEATS", "Benchmark", "Case", "Result", "bench", "chosen_cases"]
