"""A run as the page shows it: numbers and words, and nothing that still has to be computed."""

from __future__ import annotations

import base64
import shlex
from dataclasses import dataclass
from typing import Any

import numpy as np

from posleak.claims import Result
from posleak.doctor import Diagnosis
from posleak.leakage import Estimate, tidy
from posleak.leakage.sampled import LEVEL
from posleak.leakage.summary import Numbers
from posleak.origin import OriginRecord, StoredOrigin
from posleak.runs import Record, Run
from posleak.show import words

from .curves import parts
from .gather import Shown

MOST_CURVES = 640
"""Most heads on one page that have curves, so that it stays below 10 MB: those with most leakage are chosen."""


@dataclass(frozen=True)
class Layers:
    """By layer: powers and stabilisation of all and of early queries, and attention to position 0."""

    numbers: dict[str, Numbers]
    sink_attention: Estimate


@dataclass(frozen=True)
class Pictures:
    """What the page's script draws of position 0, as base64: the portrait [J, token, 2], cosines of fingerprints."""

    tokens: list[str]
    picture: str
    depths: int
    cosine: str | None
    cosine_size: int
    readers: list[list[int]]


@dataclass(frozen=True)
class View:
    """One run. `heads.numbers` are the rows of heads.parquet, unrounded; `edited`: claims that compare a condition."""

    label: str
    record: Record
    facts: list[str]
    prompts: int
    partial: bool
    lead: str
    answer: dict[str, dict[str, Estimate]]
    layers: Layers
    parts: tuple[str, ...]
    heads: dict[str, Any]
    curves: dict[str, Any]
    claims: tuple[Result, ...]
    edited: tuple[Result, ...]
    origin: OriginRecord | None
    pictures: Pictures | None
    doctor: Diagnosis | None
    remainder: float
    command: str
    notes: list[str]
    level: float = LEVEL

    @property
    def length(self) -> int:
        return self.record.spec.length


def view(shown: Shown, most_curves: int = MOST_CURVES) -> View:
    run, claims = shown.run, shown.claims or ()
    answer = {queries: numbers.share for queries, numbers in run.summary.model.items()}
    return View(
        label=shown.label, record=run.record, facts=_facts(run), prompts=run.prompts, partial=shown.partial,
        lead=words.lead(answer["all"]), answer=answer,
        layers=Layers(run.summary.layers, run.summary.layer_sink_attention), parts=parts(run.data), heads=_heads(run),
        curves=_curves(shown, most_curves), claims=claims,
        edited=tuple(result for result in claims if result.edited is not None),
        origin=None if shown.origin is None else shown.origin.record,
        pictures=None if shown.origin is None else _pictures(shown.origin), doctor=shown.doctor,
        remainder=run.remainder, command=command(shown), notes=[*run.record.warnings, *shown.notes],
    )  # fmt: skip


def _facts(run: Run) -> list[str]:
    record = run.record
    first, size, *rest = record.identity.facts
    edits = [f"edits: {', '.join(record.spec.edits)}"] if record.spec.edits else []
    return [
        f"{first}, {size}", *rest, f"n = {run.prompts} prompts of {record.spec.length} tokens",
        f"inputs: {record.spec.inputs}", f"position 0: {record.inputs.first_token}", f"seed {record.spec.seed}", *edits,
    ]  # fmt: skip


def _heads(run: Run) -> dict[str, Any]:
    """heads.parquet as columns: `numbers` is float64 [column, layer, head, (value, low, high)]."""
    layers, heads = run.data.sizes["layer"], run.data.sizes["head"]
    columns: dict[tuple[str, str, str | None], Any] = {}
    for row in tidy(run.summary):
        key = row["queries"], row["quantity"], row["component"]
        cells = columns.setdefault(key, np.full((layers, heads, 3), np.nan))
        cells[row["layer"], row["head"]] = row["value"], row["low"], row["high"]
    there = np.isfinite(run.data["sink_attention"].values[0]).sum(-1)
    return {
        "shape": [layers, heads], "heads": there.tolist(), "columns": [list(key) for key in columns],
        "numbers": packed(np.stack(list(columns.values())), "<f8"),
    }  # fmt: skip


def _curves(shown: Shown, most: int) -> dict[str, Any]:
    """Curves of the heads with most leakage, float32; `at[layer][head]` is where in the arrays a head is, or −1."""
    found, run = shown.curves, shown.run
    total = run.summary.heads["all"].power["total"].value
    there = np.isfinite(run.data["sink_attention"].values[0])
    order = np.argsort(-np.where(np.isfinite(total), total, -np.inf), axis=None, kind="stable")
    chosen = np.sort(np.array([k for k in order.tolist() if there.flat[k]][:most], dtype=np.int64))
    at = np.full(total.size, -1)
    at[chosen] = np.arange(len(chosen))

    def pack(estimate: Estimate) -> str:
        cells = np.stack([estimate.value, estimate.low, estimate.high], axis=-2)  # [L, H, 3, X]
        return packed(cells.reshape(total.size, *cells.shape[2:])[chosen], "<f4")

    return {
        "queries": found.queries, "offsets": found.offsets, "at": at.reshape(total.shape).tolist(),
        "mean": {name: pack(estimate) for name, estimate in found.mean.items()},
        "power": {name: pack(estimate) for name, estimate in found.power.items()},
        "attention": pack(found.attention), "early": pack(found.early), "late": pack(found.late),
    }  # fmt: skip


def packed(array: Any, dtype: str) -> str:
    """Base64 of little-endian numbers, C order."""
    return base64.b64encode(np.ascontiguousarray(array, dtype=dtype).tobytes()).decode()


def _pictures(stored: StoredOrigin) -> Pictures:
    arrays = stored.arrays
    names = [str(name or f"token {token}") for name, token in zip(arrays["spelled"].values, arrays["token"].values)]
    cosine, readers = arrays["cosine"].values, arrays["reader_head"].values.tolist()
    matrices = np.concatenate([cosine.mean(0, keepdims=True), cosine]) if readers else None
    return Pictures(
        tokens=names, picture=packed(np.moveaxis(arrays["picture"].values, 1, 0), "<f4"),
        depths=int(arrays.sizes["depth"]), cosine=None if matrices is None else packed(matrices, "<f4"),
        cosine_size=int(arrays.sizes["token_a"]), readers=readers,
    )  # fmt: skip


def command(shown: Shown) -> str:
    """The command line that measures the same again."""
    spec, verb = shown.run.record.spec, "measure" if shown.claims is None else "claims"
    line = ["posleak", verb, shown.run.name, "--inputs", spec.inputs, "--bos", str(spec.bos)]
    line += ["--length", str(spec.length), "--prompts", str(spec.prompts), "--seed", str(spec.seed)]
    if verb == "measure":
        line += ["--batch", str(spec.batch), "--density", str(spec.density)]
        line += [word for edit in spec.edits for word in ("--edit", edit)]
    return shlex.join(line)
