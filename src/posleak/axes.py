"""The glossary of axes, symbols and terms. Each letter and each word has one meaning in the whole package.

Axes (letters in array shapes; dimension names in results)

    B  prompt     prompts; expectations are taken over this axis
    L  layer      attention calls of one forward pass, in call order; each call carries the index of its layer in the
                  model, and `layer_names` distinguishes several calls of one layer
    H  head       query heads
    K             key and value heads; K divides H, and they are never repeated in memory
    T             positions 0 … N−1 of one prompt; N is the prompt length
    P             sampled positions: the rows of a plan (queries, then references), or positions whose states are kept
    Q  query      measured query positions i
    R  reference  late query positions r with which i is compared
    D  offset     offsets δ = i − j at which two queries are compared
    E, Ev         width of the queries and keys of one head, and of its values
    W             width of the residual stream
    J  depth      points of the residual stream: 0 is the embedding, j is the output of layer j − 1
    X             tokens that are evaluated alone at several positions
    Y             targets of a regression
    S             jackknife replicates: the statistic without one prompt, or without two

    threshold, band, scale   axes of graph, spectrum and wavelet metrics (metrics/)
    sample                   short prompts that only some metrics use

Symbols (derived in docs/definitions.md)

    s_ij      attention logit: after scaling, soft-cap and bias, before the mask
    m         origin width: keys 0 … m−1 are origin keys, all later keys are body keys
    V(i)      keys visible to query i;  n_i: number of visible body keys;  m_i: number of visible origin keys
    B_i       Σ e^{s_ij} over visible body keys, plus e^{s_aux} for a head with a learned sink logit
    S_i       Σ e^{s_ij} over visible origin keys;  Z_i = B_i + S_i
    R_n       Σ_{δ<n} e^{s_r(δ)} (+ e^{s_aux}): denominator of reference r restricted to its nearest n body keys
    s̃_rj      logit of reference r with origin key j moved to r − i + j, which is its offset from query i
    k         Σ e^{s̃_rj} over the origin keys visible to i: the origin's contribution in the crop
    φ(p)      rotation angles of the dimension pairs of a key at position p

Terms

    call         one evaluation of the attention function in a forward pass
    origin       the first m tokens of a prompt; posleak reports how later tokens read them
    body         the tokens after the origin
    crop         counterfactual: reference r as if the text between query i and r had been cut out
    part         a term of the exact additive decomposition of the total: mask, drift, sink (and scaling)
    component    any reported quantity of the decomposition: the total, a part, or a sum of parts (`COMPONENTS`)
    power        ⟨x, x⟩: mean over queries and offsets of the squared expectation of component x, in nats²
    share        ⟨x, total⟩ / ⟨total, total⟩; the shares of all parts add up to 1
    plan         sampled queries, references and offsets of a prompt length
    placement    effect of the position on queries and keys in one attention call (rotation, scaling of queries)
    edit         an intervention on the model or its inputs
    condition    a run of the baseline's prompts under a set of edits;  baseline: the run without those edits
    donor        a document placed before a prompt;  lent keys: keys of the donor that queries may attend to
    source       generator of prompts: random tokens, a constant token, crops of text
    batch        prompts that are processed in one forward pass, and the file that stores their results
    cell         one measurement of a sweep
    provenance   where the weights of a model came from
    digest       hash of all settings and data that determine the results of a run
    fingerprint  of a model (probe/fingerprint.py): some logits on a fixed prompt, which identify its behaviour;
                 of position 0 (analyses/origin): W_O v_0, the vector that a sink-reading head writes
"""

from __future__ import annotations

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
"""Parts of the exact additive decomposition: mask + drift + sink = total."""

COMPONENTS = ("total", *PARTS, "residual", "mask_without_sink")
"""All reported components. residual = drift + sink; mask_without_sink treats origin keys as ordinary body keys."""

SCALING = "scaling"
"""A fourth part, only for models that scale their queries by absolute position."""

LENT, LEFT = "lent", "left"
"""Only with a donor: the total that lent keys remove, and the total that remains."""

MIN_LENGTH = 32
"""Minimum prompt length: the last quarter of a shorter prompt has too few reference queries."""

MIN_PROMPTS = 4
"""Fewest prompts with an interval: the pair term needs n >= 4."""

EARLY = 32
"""Queries before this position are summarised as `early`."""


def layer_names(layer_ids: Sequence[int]) -> tuple[str, ...]:
    """Return a name for each attention call: the layer index `3`, or `3a` and `3b` if the layer makes two calls."""
    return tuple(f"{layer}{chr(ord('a') + k)}" if calls > 1 else str(layer) for layer, k, calls in _calls(layer_ids))


def layer_coordinates(layer_ids: Sequence[int]) -> tuple[float, ...]:
    """Return plot coordinates of attention calls: the layer index; calls of one layer are spaced evenly up to the next.

    >>> layer_coordinates([0, 0, 1])
    (0.0, 0.5, 1.0)
    """
    return tuple(layer + k / calls for layer, k, calls in _calls(layer_ids))


def _calls(layer_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return for each attention call its layer, its number within the layer, and the number of calls of the layer."""
    ids = list(layer_ids)
    return [(layer, ids[:at].count(layer), ids.count(layer)) for at, layer in enumerate(ids)]


def format_layers(layer_ids: Sequence[int]) -> str:
    """Return a short list of layers, such as `layers 0 to 29` or `layers 1, 3`."""
    distinct = sorted(set(layer_ids))
    if len(distinct) > 2 and distinct == list(range(distinct[0], distinct[-1] + 1)):
        return f"layers {distinct[0]} to {distinct[-1]}"
    return f"layer{'s' if len(distinct) > 1 else ''} {', '.join(map(str, distinct))}"
