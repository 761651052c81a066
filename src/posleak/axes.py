"""The glossary: every axis and symbol that posleak uses, once.

Axes (names of dimensions in results, and letters in shape comments)

    B  prompt   prompts; what the expectation is taken over
    L  layer    attention calls of one forward pass, in call order
    H  head     query heads (key/value heads are never repeated in memory)
    Q  query    measured query positions i
    R  reference  late query positions r that i is compared with
    D  offset   offsets δ = i − j at which two queries are compared
    T           positions 0 … N−1 of one prompt

Symbols (docs/definitions.md derives them)

    s_ij      logit that enters the softmax: after scaling, soft-cap and bias, before the mask
    V(i)      keys that query i may see;  n_i: how many of them are body keys (j ≥ 1)
    Z_i       Σ_{V(i)} e^{s_ij}, plus e^{s_aux} for a head with a learned sink logit;  Z'_i: without key 0
    sigma     σ_i = s_i0, where key 0 is visible
    R_n       Σ_{δ<n} e^{s_r(δ)}: the late query's partition, cut to its nearest n keys
    kappa     κ = e^{σ_r} − ô: how much more position 0 weighs for r than an ordinary key at its place (ô) would
    o         e^{s_r(n_i)}: an ordinary key of r at the offset where key 0 stands for i
    k         max(o + κ, 0): the position-0 term carried over from r to the place where i has it
"""

from __future__ import annotations

PROMPT = "prompt"
LAYER = "layer"
HEAD = "head"
QUERY = "query"
OFFSET = "offset"

PARTS = ("mask", "drift", "sink")
"""The three steps that turn the late query into the early one; they add up to the total, exactly."""

COMPONENTS = ("total", *PARTS, "residual", "mask_without_sink")
"""All that is reported: the total, its parts, residual = drift + sink, and the mask if position 0 were ordinary."""

SCALING = "scaling"
"""A fourth part, only of models that scale their queries by absolute position: what that scaling does."""

EARLY = 32
"""Queries before this position are summarised as `early`."""
