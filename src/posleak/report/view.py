"""A run as the page shows it: numbers and words, JSON-ready, and nothing that still has to be computed."""

from __future__ import annotations

import base64
import shlex
from dataclasses import dataclass
from typing import Any

import numpy as np

from posleak.leakage import Estimate, tidy
from posleak.plain import plain
from posleak.runs import Run

from . import words
from .curves import parts
from .sources import Source

MOST_CURVES = 640
"""Heads on one page that have curves; beyond it those with most leakage do, so that the page stays below 10 MB."""


@dataclass(frozen=True)
class View:
    """One run. `head_numbers` are the rows of heads.parquet, unrounded."""

    label: str
    model: str
    facts: list[str]
    length: int
    prompts: int
    asked: int
    lead: str
    answer: dict[str, dict[str, Any]]
    layers: dict[str, Any]
    parts: tuple[str, ...]
    windows: list[int | None]
    heads: dict[str, Any]
    curves: dict[str, Any]
    claims: list[dict[str, Any]] | None
    origin: dict[str, Any] | None
    edits: list[dict[str, Any]]
    method: dict[str, Any]
    notes: list[str]

    @property
    def partial(self) -> bool:
        return self.prompts < self.asked


def view(source: Source, most_curves: int = MOST_CURVES) -> View:
    run = source.run
    record, spec, summary = run.record, run.record["spec"], run.summary
    answer = {q: {n: plain(e) for n, e in numbers.share.items()} for q, numbers in summary.model.items()}
    return View(
        label=source.label, model=record["identity"]["name"], facts=_facts(source), length=spec["length"],
        prompts=source.prompts, asked=source.asked, lead=words.lead(answer["all"]), answer=answer,
        layers=_layers(run), parts=parts(run.data), windows=list(record["calibration"]["windows"]), heads=_heads(run),
        curves=_curves(source, most_curves), claims=source.claims, origin=_origin(source), edits=edited(source.claims),
        method=_method(source), notes=[*record["warnings"], *source.notes],
    )  # fmt: skip


def _facts(source: Source) -> list[str]:
    record, identity, spec = source.run.record, source.run.record["identity"], source.run.record["spec"]
    windows = sorted({w for w in identity["windows"] if w is not None})
    return [
        text
        for text in (
            f"{identity['architecture']}, {identity['layers']} layers × {identity['heads']} heads",
            f"window {', '.join(map(str, windows))}" if windows else "",
            identity["dtype"],
            identity["quantisation"] or "",
            f"n = {source.prompts} prompts of {spec['length']} tokens",
            f"inputs: {spec['inputs']}",
            f"position 0: {record['inputs']['first_token']}",
            f"seed {spec['seed']}",
            f"edits: {', '.join(spec['edits'])}" if spec["edits"] else "",
        )
        if text
    ]


def _layers(run: Run) -> dict[str, Any]:
    """Powers of all and of early queries, stabilisation and attention to position 0, by layer."""
    summary = run.summary
    found: dict[str, Any] = {
        queries: {
            "power": {name: plain(e) for name, e in numbers.power.items()},
            "stabilisation": plain(numbers.stabilisation),
        }
        for queries, numbers in summary.layers.items()
    }
    return {**found, "sink_attention": plain(summary.layer_sink_attention)}


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


def _curves(source: Source, most: int) -> dict[str, Any]:
    """Curves of the heads with most leakage, float32; `at[layer][head]` is where in the arrays a head is, or −1."""
    found, run = source.curves, source.run
    total = run.summary.heads["all"].power["total"].value
    there = np.isfinite(run.data["sink_attention"].values[0])
    order = np.argsort(-np.where(np.isfinite(total), total, -np.inf), axis=None, kind="stable")
    chosen = np.sort(np.array([k for k in order.tolist() if there.flat[k]][:most], dtype=np.int64))
    at = np.full(total.size, -1)
    at[chosen] = np.arange(len(chosen))

    def pack(estimate: Estimate | None) -> str | None:
        if estimate is None:
            return None
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


def _origin(source: Source) -> dict[str, Any] | None:
    """What section 4 shows; pictures only where origin.nc is there."""
    if source.origin is None:
        return None
    found, arrays = source.origin, source.arrays
    shown: dict[str, Any] = {
        name: found[name] for name in ("closure", "trajectory", "portrait", "reading", "reference")
    }
    shown |= {"fingerprint": found["fingerprint"], "prompts": found["prompts"], "tokens": found["tokens"]}
    if arrays is None:
        return {**shown, "picture": None, "cosine": None}
    names = [name or f"token {token}" for name, token in zip(arrays["spelled"].values, arrays["token"].values)]
    cosine = arrays["cosine"].values
    readers = arrays["reader_head"].values.tolist()
    matrices = np.concatenate([cosine.mean(0, keepdims=True), cosine]) if len(readers) else None
    return {
        **shown,
        "tokens_spelled": [str(name) for name in names],
        "picture": packed(np.moveaxis(arrays["picture"].values, 1, 0), "<f4"),  # [depth, token, 2]
        "depths": arrays.sizes["depth"],
        "cosine": None if matrices is None else packed(matrices, "<f4"),
        "cosine_size": arrays.sizes["token_a"],
        "readers": readers,
    }


ABOUT = {
    "bos.zero": "BOS → zero", "bos.mean": "BOS → mean embedding", "bos.noise": "BOS → noise, same norm",
    "bos.noise-2": "BOS → noise, another draw", "bos.token": "BOS → another token", "bos.none": "no BOS",
    "bos.random": "BOS → a random token per prompt", "isolation.total": "denominator fixed",
    "isolation.downstream": "denominator fixed (later layers)", "stabiliser.cut": "sink cut",
}  # fmt: skip
"""Claims that compare a condition with the baseline, and what was done there."""


def edited(claims: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Each edit with power after / before of what was measured: 1 is no change; 1 − ratio is the share removed.

    A ratio whose value is None is not defined: the power before is not clearly above 0.
    """
    found = []
    for entry in claims or []:
        if entry["id"] not in ABOUT or entry["reason"] is not None:
            continue
        details = entry["details"]
        if entry["unit"] == "times":
            ratios = {"mask": _cell(entry), "residual": details.get("residual")}
        elif entry["id"] == "isolation.total":
            ratios = {"total": _kept(_cell(entry)), "total, early": _kept(details.get("early"))}
        elif entry["id"] == "isolation.downstream":
            ratios = {"drift": _kept(_cell(entry)), "drift, early": _kept(details.get("early"))}
        else:
            ratios = {"residual, early": _kept(_cell(entry)), "residual": _kept(details.get("residual, all queries"))}
            ratios |= {name: _kept(details.get(name)) for name in ("mask, early", "total, early")}
        attention = [details.get(f"attention to position 0 {when}") for when in ("before", "after")]
        shown = {name: cell for name, cell in ratios.items() if cell is not None}
        found.append(
            {"id": entry["id"], "about": ABOUT[entry["id"]], "verdict": entry["verdict"], "ratios": shown,
             "attention": attention, "n": entry["n"]}
        )  # fmt: skip
    return found


def _cell(entry: dict[str, Any]) -> dict[str, Any]:
    return {"value": entry["effect"], "low": entry["low"], "high": entry["high"]}


def _kept(cell: dict[str, Any] | None) -> dict[str, Any] | None:
    """after / before from the share removed."""
    if cell is None:
        return None
    value, low, high = (None if cell[name] is None else 1 - cell[name] for name in ("value", "high", "low"))
    return {"value": value, "low": low, "high": high}


def _method(source: Source) -> dict[str, Any]:
    record = source.run.record
    return {
        "calibration": record["calibration"], "remainder": source.run.data.attrs["remainder"],
        "versions": record["versions"], "machine": record["machine"], "seed": record["spec"]["seed"],
        "fingerprint": record["fingerprint"], "created": record["created"], "command": command(source),
        "plan": record["plan"], "doctor": source.doctor, "definitions_version": record["definitions_version"],
        "weights_sha256": record["identity"]["weights_sha256"], "source": record["identity"]["source"],
        "quantisation": record["identity"]["quantisation"], "dtype": record["identity"]["dtype"],
        "device": record["machine"]["device"], "level": 0.95,
    }  # fmt: skip


def command(source: Source) -> str:
    """The command line that measures the same again."""
    spec, name = source.run.record["spec"], source.run.record["identity"]["name"]
    verb = "measure" if source.claims is None else "claims"
    words_ = ["posleak", verb, name, "--inputs", spec["inputs"], "--bos", str(spec["bos"])]
    words_ += ["--length", str(spec["length"]), "--prompts", str(spec["prompts"]), "--seed", str(spec["seed"])]
    if verb == "measure":
        words_ += ["--batch", str(spec["batch"]), "--density", str(spec["density"])]
        words_ += [word for edit in spec["edits"] for word in ("--edit", edit)]
    return shlex.join(words_)
