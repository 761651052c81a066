"""The glossary: every axis and symbol that posleak uses, once. A letter or a word has one meaning everywhere.

Axes (letters in shapes; names of dimensions in results)

    B  prompt     prompts; what the expectation is taken over
    L  layer      attention calls of one forward pass, in call order
    H  head       query heads
    K             key and value heads; K divides H, and they are never repeated in memory
    T             positions 0 … N−1 of one prompt; N is its length
    P             sampled positions: rows of a plan (queries, references, the last row), or those whose states are kept
    Q  query      measured query positions i
    R  reference  late query positions r that i is compared with
    D  offset     offsets δ = i − j at which two queries are compared
    E, Ev         width of one head's keys and queries, and of its values
    W             width of the residual stream
    J  depth      places of the residual stream: 0 the embedding, j after j layers
    Y             targets of a regression
    S             resamples of the bootstrap

Symbols (docs/definitions.md derives them)

    s_ij      logit that enters the softmax: after scaling, soft-cap and bias, before the mask
    V(i)      keys that query i may see;  n_i: how many of them are body keys (j ≥ 1)
    Z_i       Σ_{V(i)} e^{s_ij}, plus e^{s_aux} for a head with a learned sink logit;  Z'_i: without key 0
    sigma     σ_i = s_i0, where key 0 is visible
    R_n       Σ_{δ<n} e^{s_r(δ)}: the late query's denominator if it saw only its nearest n keys
    kappa     κ = e^{σ_r} − ô: how much more position 0 weighs for r than an ordinary key at its place (ô) would
    o         e^{s_r(n_i)}: an ordinary key of r at the offset where key 0 stands for i
    k         max(o + κ, 0): the term of position 0 in r's denominator, moved to the offset where i has position 0

Words

    origin       position 0, and what later tokens read there
    provenance   where a model's weights came from
    fingerprint  W_O v_0: what a sink-reading head writes of position 0
    digest       the hash of everything that decides a run's numbers
    source       what prompts are made of: random tokens, a constant one, crops of text
    part         mask, drift or sink (or scaling): an addend of the total
    batch        prompts that go through the model together, and the file that keeps them
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
"""All that is reported: the total, its parts, residual = drift + sink, and the mask's part if key 0 were ordinary."""

SCALING = "scaling"
"""A fourth part, only of models that scale their queries by absolute position: what that scaling does."""

EARLY = 32
"""Queries before this position are summarised as `early`."""
