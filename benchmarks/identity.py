"""Measure what identifying the model costs: its share of a measurement, and what it adds to loading.

    python benchmarks/identity.py [MODEL] > benchmarks/results/identity.json

The share is taken inside each measurement, from its own stopwatch. Loading adds one checksum of all weights.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
import warnings

import torch

import posleak as pl
from posleak.models.subject import stable_checksum
from posleak.runs.software import versions
from posleak.stopwatch import Stopwatch

ROUNDS, LENGTH, PROMPTS = 7, 256, 16


def main(model: str) -> None:
    """Measure the cost of identity checks on a model, and print it as JSON."""
    warnings.simplefilter("ignore")
    subject, shares, totals, added = pl.load(model), [], [], []
    pl.measure(subject, length=64, prompts=2)  # warm-up
    for _ in range(ROUNDS):
        with Stopwatch() as stopwatch:
            pl.measure(subject, length=LENGTH, prompts=PROMPTS)
        shares.append(stopwatch.seconds["identity"] / (stopwatch.total - stopwatch.seconds["identity"]))
        totals.append(stopwatch.total)
        started = time.perf_counter()
        stable_checksum(subject.model)
        added.append(time.perf_counter() - started)
    result = {
        "model": model, "length": LENGTH, "prompts": PROMPTS, "rounds": ROUNDS,
        "added_to_a_measurement": spread(shares), "seconds": spread(totals), "seconds_added_to_loading": spread(added),
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()}, "versions": versions(),
    }  # fmt: skip
    print(json.dumps(result, indent=2))


def spread(values: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
