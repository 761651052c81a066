"""All analyses of position 0 on one model, which share their forward passes, and the stored result.

A run folder holds origin.json, and origin.nc with the arrays for figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr

from posleak.arrays import read_netcdf
from posleak.defaults import ORIGIN_PROMPTS, ORIGIN_TOKENS, TRACED
from posleak.errors import warn
from posleak.files import Sealed, sha256_of, translate_read_errors, write_atomically
from posleak.inputs import InputFacts, Prompts, prepare
from posleak.leakage.sampled import LEVEL
from posleak.models import AnyModel, Identity, Subject, exclusive, subject_of
from posleak.probe import Calibration, Plan, calibrate, default_plan
from posleak.probe.fingerprint import changed, identified
from posleak.runs.memory import describe_prompts, fit_batch
from posleak.runs.notes import beyond_context
from posleak.runs.spec import MeasureSpec, parse_bytes, require_between
from posleak.signatures import checked
from posleak.text import visible
from posleak.typed import plain

from .context import Context, Progress, origin_plan, read_context
from .fingerprint import FINGERPRINT_TOKENS, Fingerprint, Projection, fingerprint, projections, written_by_readers
from .portrait import BodyScale, Portrait, Trajectory, ordinary_tokens
from .position_probe import PositionProbe, position_probe, written_basis
from .reading import Reading
from .states import Closure, alone

CALIBRATION_LENGTH = 128
TOKENS_AT_ONCE = 2048
ORIGIN_FILE, ARRAYS_FILE = "origin.json", "origin.nc"


@dataclass(frozen=True)
class Reference:
    """The token of the trajectory, to which the portrait's cosines refer."""

    token: int
    spelled: str | None
    is_bos: bool

    @property
    def name(self) -> str:
        spelled = self.spelled or f"token {self.token}"
        return f"BOS {spelled}" if self.is_bos else spelled


@dataclass(frozen=True, repr=False)
class Origin:
    """The analysis of position 0 of one model.

    `as_dict` is its JSON, from which it can be read back (`read_origin`) without the arrays for figures:
    `portrait.picture`, `reading.attention`, `fingerprint.matrices`.

    An estimate has value, low, high and n; with one number per depth the first three are arrays. n counts prompts, or
    tokens in the portrait and in `fingerprint.different`.
    """

    identity: Identity
    inputs: InputFacts
    length: int
    prompts: int
    seed: int
    reference: Reference
    calibration: Calibration
    closure: Closure
    trajectory: Trajectory
    portrait: Portrait
    reading: Reading
    fingerprint: Fingerprint
    position_probe: PositionProbe | None

    def __repr__(self) -> str:
        token, readers = self.reference.spelled or self.reference.token, len(self.reading.heads)
        facts = f"{self.prompts} prompts of {self.length} tokens, {self.portrait.n} first tokens"
        return f"Origin({visible(f'{self.model}: {facts}; reference {token!r}; {readers} sink-reading heads')})"

    @property
    def model(self) -> str:
        """The name of the model."""
        return self.identity.name

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of `posleak origin --json` (docs/json.md)."""
        document: dict[str, Any] = plain({"model": self.model, "tokens": self.portrait.n, "level": LEVEL, **vars(self)})
        return document


@checked
def origin(
    subject: AnyModel,
    *,
    length: int = TRACED,
    prompts: int = ORIGIN_PROMPTS,
    tokens: int = ORIGIN_TOKENS,
    seed: int = 0,
    bos: str | int = "auto",
    batch: int = 0,
    probe: bool = True,
    max_memory: str | int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Origin:
    """Analyse position 0 of a model: its states by depth, the heads that read it, and what they write.

    The reference token of trajectory and portrait is the BOS; with `bos="none"` it is the first of the drawn tokens.
    An analysis that does not fit into memory is rejected before the first forward pass.

    subject     a Subject, a transformers model, or anything that `load` accepts
    length      tokens per prompt
    prompts     number of prompts of random tokens
    tokens      number of first tokens in the portrait
    seed        random seed for the prompts and the first tokens
    bos         token at position 0, as in `measure`
    batch       prompts per forward pass (0: about 2048 tokens, fewer if `max_memory` requires it)
    probe       also run the position probe, which takes about half of the time
    max_memory  memory limit of the process, as in `measure`
    progress    callback that receives a status line

    Example: `posleak.origin("smollm2-135m").reading.readers`
    """
    plan = default_plan(length)
    why = "the position probe needs separate prompts for training, for choosing the ridge and for evaluation"
    require_between("prompts", prompts, 3, why=why)
    require_between("tokens", tokens, 2, why="cosines among first tokens need at least one pair")
    require_between("batch", batch, 0)
    who, on_status = identified(subject_of(subject, max_memory)), progress or (lambda line: None)
    long = beyond_context(who, MeasureSpec(length=length, prompts=prompts))
    at_once = fit_batch(
        who, lambda at_once: origin_plan(who, plan, prompts, min(tokens, who.vocab_size), at_once),
        min(batch or max(1, TOKENS_AT_ONCE // plan.length), prompts), parse_bytes(max_memory),
        what="the analysis of position 0", remedy="a shorter --length, fewer --prompts or --tokens",
        of=lambda at_once: f"{describe_prompts(prompts, plan.length)}, {at_once} at once, and {tokens} first tokens",
        batched=True, fixed=bool(batch),
    )  # fmt: skip
    if long is not None:
        warn(long)
    base = prepare(who, "random", bos=bos, length=length, seed=seed)
    with exclusive(who.model):
        result = _origin(who, base, plan, prompts, tokens, at_once, probe, on_status)
        if (note := changed(who)) is not None:
            warn(note)
    return result


def _origin(
    subject: Subject, base: Prompts, plan: Plan, prompts: int, tokens: int, batch: int, probe: bool, progress: Progress
) -> Origin:
    drawn = ordinary_tokens(base.vocabulary, tokens + 1, base.seed, without=base.first.id)
    reference = int(drawn[0]) if base.first.id is None else int(base.first.id)
    others = drawn[drawn != reference][:tokens]
    progress("calibration")
    start = torch.from_numpy(base.batch([0]))[:, :CALIBRATION_LENGTH].to(subject.device)
    calibration = calibrate(subject.model, start).require(subject.identity.name)
    outputs = projections(subject.model, start[:, :16])
    progress(f"portrait: {len(others)} first tokens")
    single = alone(subject.model, torch.from_numpy(np.concatenate([[reference], others])))
    context = read_context(subject, base, plan, outputs, others, prompts, batch, progress)
    progress("portrait and fingerprint")
    body = BodyScale.of(context.body)
    reading = Reading.from_batches(context.reading, plan, outputs)
    spelled, is_bos = base.vocabulary.spell(reference), base.first.id is not None
    few = [values[: FINGERPRINT_TOKENS + 1] for values in single.values]
    return Origin(
        identity=subject.identity, inputs=base.describe(), length=base.length, prompts=prompts, seed=base.seed,
        reference=Reference(reference, spelled, is_bos), calibration=calibration, closure=context.closure,
        trajectory=Trajectory.of(single.states[0], body, reference, spelled),
        portrait=Portrait.of(single, body), reading=reading,
        fingerprint=fingerprint(outputs, reading.is_reader, context.same, few, context.carried, context.changed),
        position_probe=_probe(subject, context, outputs, reading, base.seed, progress) if probe else None,
    )  # fmt: skip


def _probe(
    subject: Subject, context: Context, outputs: Sequence[Projection], reading: Reading, seed: int, progress: Progress
) -> PositionProbe:
    """Run the position probe; the removed directions are those of the BOS, or of the mean v_0 of the prompts."""
    means = [values.mean(0, keepdim=True) for values in context.values]
    directions = [
        (projection.layer, x[:, 0].float())
        for projection, x in written_by_readers(outputs, reading.is_reader, means)
        if projection.space == "output"  # elsewhere W_O is not known
    ]
    bases = written_basis(directions, len(context.body), context.body[0].shape[-1])
    return position_probe(
        context.body, context.positions, bases, seed=seed,
        device=subject.device if subject.device.type == "cuda" else None,
        progress=lambda done, of: progress(f"position probe: depth {done} of {of - 1}"),
    )  # fmt: skip


@dataclass(frozen=True)
class OriginFile:
    """origin.json: the digest of the run in the same folder, the sha256 of origin.nc, and the result."""

    digest: str
    arrays_sha256: str
    origin: Origin


SEALED = Sealed("posleak origin", 1, OriginFile, "delete it; `posleak claims` makes it again")


@dataclass(frozen=True)
class StoredOrigin:
    """The stored result of a folder; the arrays of `record` that are not part of the JSON are empty."""

    digest: str
    record: Origin
    arrays: xr.Dataset


def write_origin(folder: Path, digest: str, origin: Origin, spell: Callable[[int], str | None]) -> None:
    """Write the result next to the run with this digest. Arrays first: if origin.json exists, both files do."""
    netcdf = origin_arrays(origin, spell).to_netcdf(engine="h5netcdf")
    write_atomically(folder / ARRAYS_FILE, lambda path: path.write_bytes(netcdf))
    SEALED.write(folder / ORIGIN_FILE, OriginFile(digest, sha256_of(folder / ARRAYS_FILE), origin))


def read_origin(folder: Path) -> StoredOrigin | None:
    """Return the stored result, or None if the folder has none."""
    if not (folder / ORIGIN_FILE).is_file():
        return None
    file = SEALED.read(folder / ORIGIN_FILE)
    remedy = f"delete it and {ORIGIN_FILE}; `posleak claims` makes both again"
    with translate_read_errors(folder / ARRAYS_FILE, remedy):
        if (got := sha256_of(folder / ARRAYS_FILE)) != file.arrays_sha256:
            raise ValueError(f"sha256 {got}, not {file.arrays_sha256}: it was changed or damaged")
        return StoredOrigin(file.digest, file.origin, read_netcdf(folder / ARRAYS_FILE, remedy))


def origin_arrays(origin: Origin, spell: Callable[[int], str | None]) -> xr.Dataset:
    """Return the portrait's picture with its tokens, attention to position 0 by row, and cosines of fingerprints."""
    tokens = [origin.portrait.reference, *origin.portrait.tokens]
    heads = [(head.call, head.head) for head in origin.fingerprint.heads]
    return xr.Dataset(
        {
            "picture": (("token", "depth", "component"), origin.portrait.picture),
            "attention": (("call", "head", "row"), origin.reading.attention.mean(0)),
            "cosine": (("reader", "token_a", "token_b"), origin.fingerprint.matrices),
            "reader_head": (("reader", "which"), np.array(heads, dtype=np.int64).reshape(-1, 2)),
        },
        {
            "token": tokens,
            "spelled": ("token", [spell(token) or "" for token in tokens]),
            "row": list(origin.reading.rows),
        },
    )
