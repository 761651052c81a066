"""Per-prompt parts as labelled arrays: what is stored, and what every number is computed from.

    mask, sink, mask_without_sink, attention_0   (prompt, layer, head, query)
    drift                                        (prompt, layer, head, query, offset)
    renormalisation, logit                       (prompt, layer, head, query) and (prompt, layer, head, offset):
                                                 the logits are s_i(δ) = drift + renormalisation + logit, s_r(δ) = logit
    profile                                      (prompt, layer, head, position)  attention of the references to the
                                                 first positions;  ordinary (prompt, layer, head): to one far key
    lent                                         (prompt, layer, head, query)  only under a borrowed context
    scaling                                      (prompt, layer, head, query, offset)  only for models that scale their
                                                 queries by position
    pairs                                        (layer, query, offset)  where a query has a body key at an offset
    remainder                                    (prompt batch maximum, as an attribute)

A layer is one attention call, in call order, labelled with the number that the model gives to its layer; `call` counts
the calls. Layers with fewer heads than the widest are filled with NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Float64
from numpy.typing import NDArray

from posleak.axes import CALL, COMPONENTS, HEAD, LAYER, LEFT, LENT, OFFSET, PARTS, POSITION, PROMPT, QUERY, SCALING
from posleak.errors import CheckError
from posleak.probe import Plan

from .split import Parts

PER_QUERY = ("mask", "sink", "mask_without_sink", "attention_0", "renormalisation")
ARRAYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(PER_QUERY, (PROMPT, LAYER, HEAD, QUERY)),
    "drift": (PROMPT, LAYER, HEAD, QUERY, OFFSET),
    "logit": (PROMPT, LAYER, HEAD, OFFSET),
    "profile": (PROMPT, LAYER, HEAD, POSITION),
    "ordinary": (PROMPT, LAYER, HEAD),
}
"""The per-prompt arrays and their axes."""

OPTIONAL: dict[str, tuple[str, ...]] = {
    SCALING: (PROMPT, LAYER, HEAD, QUERY, OFFSET),
    LENT: (PROMPT, LAYER, HEAD, QUERY),
}
"""Arrays that only some models have."""

NATS = (*PARTS, SCALING, LENT, "mask_without_sink", "renormalisation", "logit")
UNITS = {**dict.fromkeys(NATS, "nats"), **dict.fromkeys(("attention_0", "profile", "ordinary"), "1")}

Chunk = dict[str, NDArray[Any]]
"""One batch of prompts, all layers: the arrays above, `pairs`, and `remainder` as a scalar."""


def stack_layers(layers: Sequence[Parts]) -> Chunk:
    """The layers of one forward pass side by side: [B, L, H, ...], padded with NaN to the widest layer."""
    widest = max(parts.mask.shape[1] for parts in layers)
    chunk: Chunk = {name: np.stack([_padded(getattr(p, name), widest) for p in layers], axis=1) for name in ARRAYS}
    for name, like in ((SCALING, "drift"), (LENT, "mask")):
        found = [getattr(parts, name) for parts in layers]
        if any(x is not None for x in found):
            here = [getattr(p, like) * 0 if x is None else x for p, x in zip(layers, found, strict=True)]
            chunk[name] = np.stack([_padded(x, widest) for x in here], axis=1)
    chunk["pairs"] = np.stack([parts.pairs.cpu().numpy() for parts in layers])
    chunk["remainder"] = np.array(np.max([parts.remainder for parts in layers]))
    return chunk


def _padded(x: Float[torch.Tensor, "B _H *rest"], heads: int) -> Float64[np.ndarray, "B {heads} *rest"]:
    array = x.double().cpu().numpy()
    missing = [(0, 0), (0, heads - array.shape[1]), *[(0, 0)] * (array.ndim - 2)]
    return np.pad(array, missing, constant_values=np.nan)


def require_finite(arrays: Mapping[str, NDArray[Any]], heads: Sequence[int], where: str, remedy: str) -> None:
    """Refuse parts that hold NaN or infinity where numbers belong; heads: how many each layer has.

    There are no numbers beyond a layer's heads, and at pairs of query and offset that do not exist. `ordinary` is not
    defined where the references see no far key.
    """
    there = np.arange(max(heads)) < np.array(heads)[:, None]
    pairs: NDArray[np.bool_] = arrays["pairs"]
    needed = {
        (QUERY,): there[..., None],
        (POSITION,): there[..., None],
        (OFFSET,): there[..., None] & pairs.any(1, keepdims=True),
        (QUERY, OFFSET): there[..., None, None] & pairs[:, None],
    }
    bad = {
        name: int((~np.isfinite(arrays[name]) & needed[axes[3:]]).sum())
        for name, axes in (ARRAYS | OPTIONAL).items()
        if name in arrays and name != "ordinary"
    } | {"remainder": int(not np.isfinite(arrays["remainder"]))}
    if any(bad.values()):
        raise CheckError(
            "the parts hold NaN or infinity where numbers belong", where=where,
            got=", ".join(f"{count} in {name}" for name, count in bad.items() if count), expected="finite numbers",
            remedy=remedy,
        )  # fmt: skip


def assemble(
    chunks: Sequence[Chunk],
    plan: Plan,
    numbers: Sequence[int] | None = None,
    more: Mapping[str, xr.Variable] | None = None,
    labels: Mapping[str, Sequence[Any]] | None = None,
) -> xr.Dataset:
    """All prompts of a measurement as one dataset; numbers: the model's own layer of each call, if they are known.

    more: arrays that others have made of the same prompts, with `labels` for axes that only they have.
    """
    data = {
        name: xr.Variable(axes, np.concatenate([chunk[name] for chunk in chunks]), {"units": UNITS[name]})
        for name, axes in (ARRAYS | OPTIONAL).items()
        if name in chunks[0]
    }
    data |= more or {}
    data["pairs"] = xr.Variable((LAYER, QUERY, OFFSET), chunks[0]["pairs"])
    coords: dict[str, Any] = {QUERY: list(plan.queries), OFFSET: list(plan.offsets)}
    sizes = {axis: size for variable in data.values() for axis, size in variable.sizes.items()}
    coords.update({axis: list(range(sizes[axis])) for axis in (PROMPT, LAYER, HEAD, POSITION)})
    coords |= {axis: list(found) for axis, found in (labels or {}).items() if axis in sizes}
    if numbers is not None:
        coords |= {LAYER: list(numbers), CALL: (LAYER, list(range(len(numbers))))}
    remainder = float(np.max([chunk["remainder"] for chunk in chunks]))  # NaN, if any is: Python's max passes it over
    return xr.Dataset(data, coords, {"remainder": remainder})


def component(data: xr.Dataset, name: str) -> Float64[xr.DataArray, "B L H Q D"]:
    """One component at every pair, NaN where a pair does not exist.

    Parts that do not depend on the offset count once at every pair, so that all components share one support.
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
    """The components that a measurement has: the parts and what is made of them, and others where they occur."""
    return (*COMPONENTS, *[name for name, of in ((SCALING, SCALING), (LEFT, LENT)) if of in data])
