"""The glossary: every axis and symbol that posleak uses, once. A letter or a word has one meaning everywhere.

Axes (letters in shapes; names of dimensions in results)

    B  prompt     prompts; what the expectation is taken over
    L  layer      attention calls of one forward pass, in call order; each carries the number that its layer has in the
                  model, and `layer_names` tells several calls of one layer apart
    H  head       query heads
    K             key and value heads; K divides H, and they are never repeated in memory
    T             positions 0 … N−1 of one prompt; N is its length
    P             sampled positions: rows of a plan (queries, references), or those whose states are kept
    Q  query      measured query positions i
    R  reference  late query positions r that i is compared with
    D  offset     offsets δ = i − j at which two queries are compared
    E, Ev         width of one head's keys and queries, and of its values
    W             width of the residual stream
    J  depth      places of the residual stream: 0 the embedding, j after j layers
    X             tokens that are looked at alone, at several places
    Y             targets of a regression
    S             replicates: a number without one prompt, or without two

    threshold, band, scale   of graphs, spectra and wavelets (metrics/)
    sample                   short prompts that only some metrics read

Symbols (docs/definitions.md derives them)

    s_ij      logit that enters the softmax: after scaling, soft-cap and bias, before the mask
    m         width of the origin: its keys are 0 … m−1, and those from m on are the body
    V(i)      keys that query i may see;  n_i: how many of them are body keys;  m_i: how many of the origin
    B_i       Σ of e^{s_ij} over visible body keys, plus e^{s_aux} for a head with a learned sink logit
    S_i       the same over visible origin keys;  Z_i = B_i + S_i
    R_n       Σ_{δ<n} e^{s_r(δ)} (+ e^{s_aux}): the late query's denominator if it saw only its nearest n body keys
    s̃_rj      logit of query r with the origin's key j moved to r − i + j, where i has it
    k         Σ of e^{s̃_rj} over the origin keys that i sees: the origin in the crop
    φ(p)      angles by which position p turns the pairs of dimensions of a key

Words

    origin       the first m tokens, and what later tokens read there
    crop         a late query as if the text between an early one and it had been cut out
    donor        the document that a borrowed context is taken from;  lent keys: those of it that a query is shown
    provenance   where a model's weights came from
    fingerprint  W_O v_0: what a sink-reading head writes of position 0
    digest       the hash of everything that decides a run's numbers
    source       what prompts are made of: random tokens, a constant one, crops of text
    part         mask, drift or sink (or scaling): an addend of the total
    batch        prompts that go through the model together, and the file that keeps them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

PROMPT = "prompt"
LAYER = "layer"
CALL = "call"
HEAD = "head"
QUERY = "query"
OFFSET = "offset"
POSITION = "position"
DEPTH = "depth"
THRESHOLD = "threshold"
BAND = "band"
SCALE = "scale"
SAMPLE = "sample"

PARTS = ("mask", "drift", "sink")
"""The three steps that turn the late query into the early one; they add up to the total, exactly."""

COMPONENTS = ("total", *PARTS, "residual", "mask_without_sink")
"""All that is reported: the total, its parts, residual = drift + sink, and the mask's part if nothing were a sink."""

SCALING = "scaling"
"""A fourth part, only of models that scale their queries by absolute position: what that scaling does."""

LENT, LEFT = "lent", "left"
"""Only under a borrowed context: what its keys take away from the total, and the total that is left with them."""

MIN_LENGTH = 32
"""Tokens of the shortest prompt that can be measured: below, its last quarter holds too few reference queries."""

EARLY = 32
"""Queries before this position are summarised as `early`."""


def layer_names(numbers: Sequence[int]) -> tuple[str, ...]:
    """What the attention calls of a model are called: the layer's own number, `3`; `3a` and `3b` where it makes two."""
    calls, seen, names = Counter(numbers), Counter[int](), []
    for number in numbers:
        names.append(f"{number}{chr(ord('a') + seen[number])}" if calls[number] > 1 else str(number))
        seen[number] += 1
    return tuple(names)


def layer_coordinates(numbers: Sequence[int]) -> tuple[float, ...]:
    """Where they stand on an axis of layers: at their number; several calls of one layer share the way to the next."""
    calls, seen, places = Counter(numbers), Counter[int](), []
    for number in numbers:
        places.append(number + seen[number] / calls[number])
        seen[number] += 1
    return tuple(places)


def format_layers(numbers: Sequence[int]) -> str:
    """`layers 0 to 29`; `layers 1, 3`"""
    distinct = sorted(set(numbers))
    if len(distinct) > 2 and distinct == list(range(distinct[0], distinct[-1] + 1)):
        return f"layers {distinct[0]} to {distinct[-1]}"
    return f"layer{'s' if len(distinct) > 1 else ''} {', '.join(map(str, distinct))}"
