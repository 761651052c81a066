"""Default arguments of the Python functions and of the command-line options. This module imports nothing."""

MODEL = "smollm2-135m"
INPUTS, TEXT_INPUTS = "random", "text:stdlib"
"""Source of the prompts; `advise`, which reports the loss, uses text."""

LENGTH, PROMPTS = 512, 16
"""Tokens per prompt and number of prompts."""

TRACED = 256
"""Tokens per prompt in analyses that read every prompt several times: `trace`, `claims`, `origin`."""

CIRCUIT_LENGTH, CIRCUIT_PROMPTS, NODES = 128, 48, 5
"""Tokens per prompt and prompts of `circuit`, which ranks heads on one half and tests them on the other; nodes of the
integral of its gradients."""

DONORS = ("plain", "long")
"""Documents before the prompt in `trace`: of N + 64 tokens, and of 3N tokens whose queries see at most N keys each."""

COMPARED_BY = ("model", "layer", "head")
"""What `compare` compares: means over all heads, over the heads of a layer, or single heads."""

ORIGIN_PROMPTS, ORIGIN_TOKENS = 8, 1024
"""Prompts of `origin`, and first tokens in its portrait."""

TOKENS_AT_ONCE = 4096
"""Tokens per forward pass, unless the memory limit is lower or one prompt is longer: the same on every machine, since
the batch size affects the last bits of results."""

DOCTOR_LENGTH, DOCTOR_PROMPTS = 96, 12
BOS, SEED, BATCH, DENSITY = "auto", 0, 0, 1

DEFAULT_ORIGIN = 4
"""Number of leading tokens treated as the origin: as many as StreamingLLM keeps."""

RUNS = "runs"
"""Parent of the run folders that the command line chooses itself."""
