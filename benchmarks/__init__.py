"""Benchmarks: time and memory of posleak, of the plain forward pass, and of other tools (peers).

statistics  what every case computes, and the largest difference between two cases
cases       the cases: forward pass, posleak, peers
memory      memory that a case will need
worker      peak memory of one case, in its own process
timing      interleaved rounds, medians and ratios
runner      all cases, length by length
page        docs/cost.md from the stored results
identity    cost of identifying the model
coverage    coverage of the confidence intervals
"""

from .cases import CASES, Case
from .runner import LENGTHS, PEERS_UP_TO, REPEATS, Benchmark, BenchResult, bench, chosen_cases

__all__ = ["CASES", "LENGTHS", "PEERS_UP_TO", "REPEATS", "BenchResult", "Benchmark", "Case", "bench", "chosen_cases"]
