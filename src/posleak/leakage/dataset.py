"""Per-prompt parts as labelled arrays. They are stored, and every result is computed from them.

    mask, sink, mask_without_sink, attention_0   (prompt, layer, head, query)
    drift                                        (prompt, layer, head, query, offset)
    renormalisation, logit                       (prompt, layer, head, query) and (prompt, layer, head, offset):
                                                 the logits are s_i(δ) = drift + renormalisation + logit, s_r(δ) = logit
    profile                                      (prompt, layer, head, position)  attention of the references to the
                                                 first positions;  ordinary (prompt, layer, head): to one far key
    weight                                       (prompt, layer, head, offset)  attention of the references to the body
                                                 keys that an offset represents: the weights of the norm `attention`
    lent                                         (prompt, layer, head, query)  only under a borrowed context
    total_a, lent_a, total_c                     (prompt, layer, head, query[, offset])  only if the prompt is read as
                                                 the branches A, B and C (probe/branches.py); all others are of B
    scaling                                      (prompt, layer, head, query, offset)  only for models that scale their
                                                 queries by position
    pairs                                        (layer, query, offset)  whether a query has a body key at an offset
    remainder                                    an attribute: the maximum over prompts

An entry of the layer axis is one attention call, in call order, labelled with the id that the model gives to its layer;
`call` is the index of the call. Layers with fewer heads than the widest layer are padded with NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float64
from numpy.typing import NDArray

from posleak.axes import CALL, COMPONENTS, HEAD, LAYER, LEFT, LENT, OFFSET, POSITION, PROMPT, QUERY, SCALING
from posleak.errors import CheckError
from posleak.probe import Plan

from .parts import Parts

PER_QUERY = ("mask", "sink", "mask_without_sink", "attention_0", "renormalisation")
ARRAY_AXES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(PER_QUERY, (PROMPT, LAYER, HEAD, QUERY)),
    "drift": (PROMPT, LAYER, HEAD, QUERY, OFFSET),
    "logit": (PROMPT, LAYER, HEAD, OFFSET),
    "weight": (PROMPT, LAYER, HEAD, OFFSET),
    "profile": (PROMPT, LAYER, HEAD, POSITION),
    "ordinary": (PROMPT, LAYER, HEAD),
}
"""The per-prompt arrays and their axes."""

OPTIONAL = {SCALING: "drift", LENT: "mask", "total_a": "drift", "lent_a": "mask", "total_c": "drift"}
"""Arrays that exist only for some models or edits, each with the array whose axes it has."""

ALL_AXES = ARRAY_AXES | {name: ARRAY_AXES[like] for name, like in OPTIONAL.items()}
UNITS = {name: "1" if name in ("attention_0", "profile", "ordinary", "weight") else "nats" for name in ALL_AXES}

Chunk = dict[str, NDArray[Any]]
"""The arrays of one batch of prompts, with `pairs`, and with `remainder` as a scalar."""


def stack_layers(layers: Sequence[Parts]) -> Chunk:
    """Stack the layers of one forward pass: [B, L, H, ...], padded with NaN to the widest layer."""
    arrays = {name: [getattr(parts, name) for parts in layers] for name in ARRAY_AXES}
    for name, like in OPTIONAL.items():
        optional = [getattr(parts, name) for parts in layers]
        if any(x is not None for x in optional):
            arrays[name] = [y * 0 if x is None else x for x, y in zip(optional, arrays[like], strict=True)]
    chunk = {name: stack_calls([x.double().cpu().numpy() for x in arrays[name]]) for name in arrays}
    chunk["pairs"] = np.stack([parts.pairs.cpu().numpy() for parts in layers])
    chunk["remainder"] = np.array(np.max([parts.remainder for parts in layers]))
    return chunk


def stack_calls(calls: Sequence[NDArray[Any]], axes: tuple[str, ...] = (LAYER, HEAD)) -> NDArray[Any]:
    """Stack arrays [B, …] of attention calls or depths into [B, L, …], padded with NaN to the most heads of a call.

    axes: those of the result after the first
    """
    if HEAD in axes:
        at, most = axes.index(HEAD), max(x.shape[axes.index(HEAD)] for x in calls)
        missing = [[(0, most - n if axis == at else 0) for axis, n in enumerate(x.shape)] for x in calls]
        calls = [np.pad(x, width, constant_values=np.nan) for x, width in zip(calls, missing, strict=True)]
    return np.stack(calls, axis=1)


def require_finite(arrays: Mapping[str, NDArray[Any]], heads: Sequence[int], where: str, remedy: str) -> None:
    """Raise CheckError if an array is not finite where its values are defined.

    Values are undefined beyond a layer's number of heads, given by `heads`, and at pairs of query and offset that do
    not exist. `ordinary` is not checked: it is undefined where the references see no far key.
    """
    exists = np.arange(max(heads)) < np.array(heads)[:, None]
    pairs: NDArray[np.bool_] = arrays["pairs"]
    needed = {
        (QUERY,): exists[..., None],
        (POSITION,): exists[..., None],
        (OFFSET,): exists[..., None] & pairs.any(1, keepdims=True),
        (QUERY, OFFSET): exists[..., None, None] & pairs[:, None],
    }
    bad = {
        name: int((~np.isfinite(arrays[name]) & needed[axes[3:]]).sum())
        for name, axes in ALL_AXES.items()
        if name in arrays and name != "ordinary"
    } | {"remainder": int(not np.isfinite(arrays["remainder"]))}
    if any(bad.values()):
        raise CheckError(
            "the parts contain NaN or infinity", where=where,
            got=", ".join(f"{count} in {name}" for name, count in bad.items() if count), expected="finite numbers",
            remedy=remedy,
        )  # fmt: skip


def assemble(
    chunks: Sequence[Chunk],
    plan: Plan,
    layer_ids: Sequence[int] | None = None,
    more: Mapping[str, xr.Variable] | None = None,
    labels: Mapping[str, Sequence[Any]] | None = None,
) -> xr.Dataset:
    """Combine the batches of a measurement into one dataset.

    layer_ids   the model's layer id of each attention call; None: the index of the call
    more        further arrays of the same prompts, such as metrics
    labels      coordinates of axes that only these have
    """
    data = {
        name: xr.Variable(axes, np.concatenate([chunk[name] for chunk in chunks]), {"units": UNITS[name]})
        for name, axes in ALL_AXES.items()
        if name in chunks[0]
    } | dict(more or {})
    data["pairs"] = xr.Variable((LAYER, QUERY, OFFSET), chunks[0]["pairs"])
    coords: dict[str, Any] = {QUERY: list(plan.queries), OFFSET: list(plan.offsets)}
    sizes = {axis: size for variable in data.values() for axis, size in variable.sizes.items()}
    coords.update({axis: list(range(sizes[axis])) for axis in (PROMPT, LAYER, HEAD, POSITION)})
    coords |= {axis: list(values) for axis, values in (labels or {}).items() if axis in sizes}
    if layer_ids is not None:
        coords |= {LAYER: list(layer_ids), CALL: (LAYER, list(range(len(layer_ids))))}
    remainder = float(np.max([chunk["remainder"] for chunk in chunks]))  # propagates NaN, unlike Python's max
    return xr.Dataset(data, coords, {"remainder": remainder})


def component(data: xr.Dataset, name: str) -> Float64[xr.DataArray, "B L H Q D"]:
    """Return one component at every pair (query, offset); NaN where a pair does not exist.

    Parts that do not depend on the offset are repeated at every pair, so that all components have the same support.
    """
    if name == "total":
        x = data["mask"] + data["drift"] + data["sink"]
        x = x + data[SCALING] if SCALING in data else x
    elif name == "residual":
        x = data["drift"] + data["sink"]
    elif name == LEFT:
        return component(data, "total") - data[LENT]
    else:
        x = data[name]
    return x.where(data["pairs"]).transpose(PROMPT, LAYER, HEAD, QUERY, OFFSET)


def components(data: xr.Dataset) -> tuple[str, ...]:
    """Return the names of the components that a measurement has; scaling and left exist only in some."""
    return (*COMPONENTS, *[name for name, of in ((SCALING, SCALING), (LEFT, LENT)) if of in data])
