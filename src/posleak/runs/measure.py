"""One measurement from beginning to end: checks first, then calibration, then prompts, each kept when it is done."""

from __future__ import annotations

import datetime
import platform
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from posleak.edits import NamedEdit, parse_edits, require_measurable
from posleak.errors import InputError, PosleakWarning, RunError
from posleak.inputs import Prompts, prepare
from posleak.leakage import assemble, batches, cancelling_layers, measure_chunks
from posleak.leakage.dataset import Chunk
from posleak.models import Subject
from posleak.plain import plain
from posleak.probe import Calibration, Edit, Plan, calibrate, default_plan
from posleak.stopwatch import stage

from .folder import (
    FORMAT,
    FORMAT_VERSION,
    RECORD,
    read_part,
    read_record,
    remove_leftovers,
    remove_parts,
    remove_run,
    require_unused,
    write_part,
    write_record,
)
from .memory import memory_plan, parse_bytes, within_memory
from .run import Run
from .spec import COMPUTED_WITH, DEFINITIONS_VERSION, SUBJECT, MeasureSpec, fingerprint, slug, versions

CALIBRATION_LENGTH = 96

Progress = Callable[[int, int], None]
"""(prompts done, prompts in all)"""


def measure(
    subject: Subject,
    inputs: str | NDArray[np.int64] = "random",
    *,
    out: str | Path | None = None,
    fresh: bool = False,
    max_memory: str | int | None = None,
    progress: Progress = lambda done, of: None,
    **asked: Any,
) -> Run:
    """Measure a subject; `asked` are the fields of MeasureSpec (length, prompts, seed, bos, batch, density, edits).

    `max_memory` ("8GB", or bytes) is what the process may hold, the loaded model included: prompts are batched so that
    it is kept, or the measurement is refused before it starts.

    With `out` the run is kept in that folder: an unfinished one there is resumed, a finished one of the same
    measurement is read back, and `fresh` measures again. Without `out` it stays in memory.
    """
    named = inputs if isinstance(inputs, str) else "given"
    if not isinstance(inputs, str):
        inputs = np.asarray(inputs)
        asked |= {"prompts": len(inputs), "length": inputs.shape[-1]}
    edits = parse_edits(asked.get("edits", ()))
    require_measurable(edits)
    spec = MeasureSpec(inputs=named, **{**asked, "edits": tuple(edit.text for edit in edits)})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PosleakWarning)
        plan = default_plan(spec.length, spec.density)
        spec = within_memory(spec, subject, plan, parse_bytes(max_memory))
        with stage("prompts"):
            prompts = edited_prompts(subject, inputs, spec, edits)
        check_size(subject, spec)
    notes = [str(warning.message) for warning in caught]
    for note in notes:
        warnings.warn(note, PosleakWarning, stacklevel=2)
    record = _new_record(subject, spec, {"inputs": named, **asked}, plan, prompts, notes)
    record["memory"] = memory_plan(subject, spec, plan).as_dict()
    folder = None if out is None else Path(out)
    if folder is not None and (finished := _prepare_folder(folder, record, fresh)) is not None:
        return finished
    with stage("calibration"):
        calibration = calibrated(subject, prompts.batch([0]))
    record["calibration"] = plain(calibration)
    if folder is not None:
        write_record(folder, record)
    chunks = []
    with closing(_chunks(folder, subject, prompts, spec, plan, calibration, edits)) as measured:
        for at, chunk in measured:
            chunks.append(chunk)
            progress(at.stop, spec.prompts)
    return _finish(Run(record, assemble(chunks, plan), folder))


def edited_prompts(
    subject: Subject, inputs: str | NDArray[np.int64], spec: MeasureSpec, edits: Sequence[NamedEdit]
) -> Prompts:
    """The prompts that the model will read: what was asked for, after the edits that change tokens."""
    prompts = prepare(subject, inputs, bos=spec.bos, length=spec.length, seed=spec.seed)
    for edit in edits:
        prompts = edit.prompts(prompts)
    return prompts


def default_folder(subject: Subject, spec: MeasureSpec, max_memory: str | int | None = None) -> Path:
    """runs/MODEL-FINGERPRINT: the same measurement finds the same folder."""
    spec = within_memory(spec, subject, default_plan(spec.length, spec.density), parse_bytes(max_memory))
    prompts = edited_prompts(subject, spec.inputs, spec, parse_edits(spec.edits))
    print_ = fingerprint(spec, subject.identity.as_dict(), prompts.describe(), versions())
    return Path("runs") / f"{slug(subject.identity.name)}-{print_[:10]}"


def _prepare_folder(folder: Path, record: dict[str, Any], fresh: bool) -> Run | None:
    """The finished run that is there already; else None, with the folder ready to be filled or resumed."""
    remove_leftovers(folder)
    if not (folder / RECORD).exists():
        require_unused(folder)
        return None
    if fresh:
        remove_run(folder)
        return None
    earlier = read_record(folder)
    _require_same(folder, earlier, record)
    record["created"] = earlier["created"]
    return Run.load(folder) if earlier["status"] == "finished" else None


def _chunks(
    folder: Path | None,
    subject: Subject,
    prompts: Prompts,
    spec: MeasureSpec,
    plan: Plan,
    calibration: Calibration,
    edits: Sequence[Edit],
) -> Generator[tuple[range, Chunk], None, None]:
    """Batches that the folder has already, then the others; each is written as soon as it is measured."""
    todo = batches(spec.prompts, spec.batch)
    while folder is not None and todo and (chunk := read_part(folder, todo[0])) is not None:
        yield todo.pop(0), chunk
    ids = (prompts.batch(at) for at in todo)
    # Closed whatever happens: an exception that somebody keeps would keep the model attached with it.
    with closing(measure_chunks(subject.model, ids, plan, layers=calibration.layers, edits=edits)) as measured:
        for at, chunk in zip(todo, measured):
            if folder is not None:
                with stage("write"):
                    write_part(folder, at, chunk)
            yield at, chunk


def _finish(run: Run) -> Run:
    """Results first, then the record that says so, and only then the parts go."""
    record = {**run.record, "status": "finished", "finished": _now()}
    with stage("summary"):
        layers = cancelling_layers(run.summary)
    if layers:
        note = (
            f"drift and sink cancel each other in layers {layers}, where logits are very large: read their sum, the "
            "residual, there"
        )
        record["warnings"] = [*record["warnings"], note]
        warnings.warn(note, PosleakWarning, stacklevel=3)
    if run.path is not None:
        with stage("write"):
            record["files"] = run.write_results(run.path)
            write_record(run.path, record)
            remove_parts(run.path)
    return Run(record, run.data, run.path)


def calibrated(subject: Subject, ids: NDArray[np.int64]) -> Calibration:
    """Calibration on the start of the first of ids [B, T], past every affordable window; required to hold."""
    windows = [w * 5 // 4 for w in subject.identity.windows if w is not None and w <= 1024]
    length = max([CALIBRATION_LENGTH, *windows])
    return calibrate(subject.model, torch.from_numpy(ids[:1, :length]).to(subject.device)).require(
        subject.identity.name
    )


def check_size(subject: Subject, spec: MeasureSpec) -> None:
    """Too long, too short for a window, too few: said before the first forward pass."""
    context = subject.context
    if context is not None and spec.length > context:
        what = f"length {spec.length} is beyond the model's context of {context} positions"
        if not subject.identity.rotary:
            raise InputError(what, where=subject.identity.name, remedy=f"use --length {context} or less")
        warnings.warn(f"{what}: what is measured there is extrapolation", PosleakWarning, stacklevel=2)
    if (window := min((w for w in subject.identity.windows if w is not None), default=0)) >= spec.length:
        warnings.warn(
            f"the sliding window of {window} tokens is longer than the prompts: it hides nothing, and windowed layers "
            f"are measured as if they saw everything; use --length {2 * window} or more to see the window",
            PosleakWarning,
            stacklevel=2,
        )
    if spec.prompts < 2:
        warnings.warn(
            "one prompt: noise cannot be told from signal, so powers and intervals are NaN; use --prompts 2 or more",
            PosleakWarning,
            stacklevel=2,
        )


def _new_record(
    subject: Subject,
    spec: MeasureSpec,
    asked: dict[str, Any],
    plan: Plan,
    prompts: Prompts,
    notes: list[str],
) -> dict[str, Any]:
    identity, described, computed_with = subject.identity.as_dict(), prompts.describe(), versions()
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "definitions_version": DEFINITIONS_VERSION,
        "status": "running",
        "fingerprint": fingerprint(spec, identity, described, computed_with),
        "asked": plain(asked),
        "spec": spec.as_dict(),
        "plan": plain(plan),
        "identity": identity,
        "inputs": described,
        "versions": computed_with,
        "machine": {"platform": platform.platform(), "python": platform.python_version(),
                    "device": str(subject.device), "threads": torch.get_num_threads()},
        "warnings": notes,
        "created": _now(),
        "files": {},
    }  # fmt: skip


def _require_same(folder: Path, earlier: dict[str, Any], now: dict[str, Any]) -> None:
    if earlier["fingerprint"] != now["fingerprint"]:
        differing = "; ".join(_differences(earlier, now)) or "another version of the definitions"
        raise RunError(
            "the folder holds another measurement", where=str(folder), got=differing,
            remedy="choose another --out, or --fresh to measure again and overwrite it",
        )  # fmt: skip


def _differences(earlier: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What makes two fingerprints differ, in words."""
    for group, names in (("spec", None), ("identity", SUBJECT), ("inputs", None), ("versions", COMPUTED_WITH)):
        for name in names or now[group]:
            there, asked = earlier[group].get(name), now[group].get(name)
            if there != asked:
                yield f"{name} {there!r} there, {asked!r} asked for"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
