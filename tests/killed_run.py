"""A measurement in a process of its own, to be killed: `python killed_run.py MODEL_FOLDER OUT SECONDS`.

It prints a line after every batch and then sleeps, so that whoever reads the lines can choose the moment.
"""

from __future__ import annotations

import sys
import time

import torch

import posleak as pl
from runs_tiny import SPEC

if __name__ == "__main__":
    model, out, seconds = sys.argv[1:]
    torch.set_num_threads(1)

    def report(done: int, of: int) -> None:
        print(done, of, flush=True)
        time.sleep(float(seconds))

    pl.measure(pl.load(model), out=out, progress=report, **SPEC)
    print("finished", flush=True)
