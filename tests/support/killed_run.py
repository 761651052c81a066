"""Work in a process that a test kills: `python -m support.killed_run measure|claims MODEL_FOLDER OUT SECONDS`.

It prints a line after every step and then sleeps, so that the test can choose the step.
"""

from __future__ import annotations

import sys
import time
import warnings

import torch

import posleak as pl
from support.runs_tiny import SPEC

if __name__ == "__main__":
    work, model, out, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*too few for a verdict")

    def report(*said: object) -> None:
        print(*said, flush=True)
        time.sleep(float(seconds))

    subject = pl.load(model)
    if work == "measure":
        pl.measure(subject, out=out, progress=report, **SPEC)
    else:
        pl.claims(subject, out=out, progress=report, length=48, prompts=4)
    print("finished", flush=True)
