"""What a measurement costs: posleak beside the plain forward pass and its peers, the tools that could do the same.

statistics  what every contestant computes, and how far two are apart
cases       the contestants
worker      peak memory of one contestant, in a process of its own
timing      interleaved repeats, medians and ratios
contest     all of it, length by length
"""

from .cases import CASES, Case
from .contest import LENGTHS, PEERS_UP_TO, REPEATS, Benchmark, BenchResult, bench, chosen_cases

__all__ = ["CASES", "LENGTHS", "PEERS_UP_TO", "REPEATS", "BenchResult", "Benchmark", "Case", "bench", "chosen_cases"]
