"""Every claim on one subject, into a run folder: its baseline is an ordinary run, and each finding is kept at once.

claims.json   findings so far; a claim that is there is not tested again
origin.json   position 0 of the same subject, and origin.nc with the arrays that figures need
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from posleak.errors import RunError
from posleak.models import Subject
from posleak.origin import Origin
from posleak.plain import plain
from posleak.studies import Lab, examine, registry

from .folder import write_atomically
from .measure import measure
from .run import Run

CLAIMS, ORIGIN, ORIGIN_ARRAYS = "claims.json", "origin.json", "origin.nc"
LENGTH, PROMPTS = 256, 16


@dataclass(frozen=True)
class ClaimsRun:
    """The baseline, and what was found; `findings` are JSON objects (docs/json.md)."""

    run: Run
    findings: list[dict[str, Any]]

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of `posleak claims --json`."""
        spec, record = self.run.record["spec"], self.run.record
        return {
            "model": record["identity"]["name"], "identity": record["identity"], "inputs": record["inputs"],
            "length": spec["length"], "prompts": spec["prompts"], "seed": spec["seed"],
            "calibration": record["calibration"], "claims": self.findings, "warnings": record["warnings"],
            "run": None if self.run.path is None else str(self.run.path),
        }  # fmt: skip


def claims(
    subject: Subject,
    *,
    out: str | Path | None = None,
    fresh: bool = False,
    progress: Callable[[str], None] = lambda what: None,
    length: int = LENGTH,
    prompts: int = PROMPTS,
    seed: int = 0,
    bos: str = "auto",
    inputs: str = "random",
) -> ClaimsRun:
    """Test every claim. With `out`, findings that the folder has are kept, and each new one is written at once."""
    folder = None if out is None else Path(out)
    progress("baseline")
    run = measure(
        subject, inputs, out=folder, fresh=fresh, length=length, prompts=prompts, seed=seed, bos=bos,
        progress=lambda done, of: progress(f"baseline: {done} of {of} prompts"),
    )  # fmt: skip
    lab = Lab(subject, length, prompts, seed, bos, inputs, progress).with_baseline(run.data)
    kept = {} if folder is None or fresh else {entry["id"]: entry for entry in read_claims(folder, run)}
    for result in examine(lab, [claim for claim in registry() if claim.id not in kept]):
        kept[result.claim.id] = result.as_dict()
        if folder is not None:
            _write(folder / CLAIMS, {"fingerprint": run.record["fingerprint"], "claims": _ordered(kept)})
    if folder is not None and lab.has_origin:
        write_origin(folder, lab)
    return ClaimsRun(run, _ordered(kept))


def _ordered(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [found[claim.id] for claim in registry() if claim.id in found]


def read_claims(folder: Path, run: Run) -> list[dict[str, Any]]:
    """The findings that a folder has about this run; none where it has none."""
    path = folder / CLAIMS
    if not path.exists():
        return []
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RunError(
            "claims.json is corrupt", where=str(path), got=str(error), remedy="delete it and start again"
        ) from error
    return stored["claims"] if stored["fingerprint"] == run.record["fingerprint"] else []


def write_origin(folder: Path, lab: Lab) -> None:
    """Position 0, as JSON and as the arrays that figures are drawn from."""
    _write(folder / ORIGIN, lab.origin.as_dict())
    netcdf = origin_arrays(lab.origin, lab.tokens.vocabulary.spell).to_netcdf(engine="h5netcdf")
    write_atomically(folder / ORIGIN_ARRAYS, lambda path: path.write_bytes(netcdf))


def origin_arrays(found: Origin, spell: Callable[[int], str | None]) -> xr.Dataset:
    """The portrait's picture with its tokens, attention to position 0 by row, and cosines of fingerprints."""
    tokens = [found.portrait.reference, *found.portrait.tokens.tolist()]
    heads = np.array(found.fingerprint.heads, dtype=np.int64).reshape(-1, 2)
    return xr.Dataset(
        {
            "picture": (("token", "depth", "component"), found.portrait.picture),
            "attention": (("call", "head", "row"), found.reading.attention.mean(0)),
            "cosine": (("reader", "token_a", "token_b"), found.fingerprint.matrices),
            "reader_head": (("reader", "which"), heads),
        },
        {
            "token": tokens,
            "spelled": ("token", [spell(token) or "" for token in tokens]),
            "row": list(found.reading.rows),
        },
    )


def _write(path: Path, value: Any) -> None:
    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, lambda temporary: temporary.write_text(text + "\n", encoding="utf-8"))
