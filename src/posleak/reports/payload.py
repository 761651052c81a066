"""Arrays as the page's script reads them: packed into base64 once."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from posleak.arrays import Array
from posleak.leakage import Estimate
from posleak.typed import plain

from .view import RunView


def run_data(view: RunView, most_curves: int) -> dict[str, Any]:
    """Return everything but the figures; `most_curves` heads have curves, those with the largest total power."""
    data: dict[str, Any] = {
        "label": view.label, "length": view.record.spec.length, "parts": view.parts, "sources": view.sources,
        "names": view.names, "windows": view.record.calibration.windows, "heads": _heads(view),
        "curves": _curves(view, most_curves), "origin": _origin(view),
    }  # fmt: skip
    return plain(data)  # type: ignore[no-any-return]


def _heads(view: RunView) -> dict[str, Any]:
    """`numbers` is float64 [column, layer, head, (value, low, high)]."""
    columns = view.head_columns
    return {
        "shape": list(view.existing.shape), "heads": view.existing.sum(-1).tolist(),
        "columns": [list(key) for key in columns],
        "numbers": packed(np.stack([_ends(cells, -1) for cells in columns.values()]), "<f8"),
    }  # fmt: skip


def _curves(view: RunView, most: int) -> dict[str, Any]:
    """float32; `at[layer][head]` is the index of a head in the arrays, or −1."""
    curves, total = view.curves, view.summary.heads["all"].power["total"].value
    order = np.argsort(-np.where(np.isfinite(total), total, -np.inf), axis=None, kind="stable")
    chosen = np.sort(order[view.existing.flat[order]][:most])
    at = np.full(total.size, -1)
    at[chosen] = np.arange(len(chosen))

    def pack(estimate: Estimate) -> str:
        cells = _ends(estimate, -2)  # [L, H, 3, X]
        return packed(cells.reshape(total.size, *cells.shape[2:])[chosen], "<f4")

    return {
        "queries": curves.queries, "offsets": curves.offsets, "at": at.reshape(total.shape).tolist(),
        "mean": {name: pack(estimate) for name, estimate in curves.mean.items()},
        "power": {name: pack(estimate) for name, estimate in curves.power.items()},
        "attention": pack(curves.attention), "early": pack(curves.early), "late": pack(curves.late),
    }  # fmt: skip


def _origin(view: RunView) -> dict[str, Any] | None:
    """The portrait [J, token, 2], and cosines of fingerprints: their mean, then one matrix per sink-reading head."""
    if view.origin is None:
        return None
    arrays, portrait, readers = view.origin.arrays, view.origin.record.portrait, view.readers
    cosine = arrays["cosine"].values
    matrices = packed(np.concatenate([cosine.mean(0, keepdims=True), cosine]), "<f4") if readers else None
    return {
        "tokens": view.first_tokens, "picture": packed(np.moveaxis(arrays["picture"].values, 1, 0), "<f4"),
        "depths": int(arrays.sizes["depth"]), "cosine": matrices, "cosine_size": int(arrays.sizes["token_a"]),
        "readers": readers, "explained": portrait.explained, "among": portrait.among,
    }  # fmt: skip


def _ends(estimate: Estimate, axis: int) -> Array:
    return np.stack([estimate.value, estimate.low, estimate.high], axis=axis)


def packed(array: Any, dtype: str) -> str:
    """Return the base64 of little-endian numbers in C order."""
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode()
