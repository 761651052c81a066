"""One measurement from its checks to its results: checks first, then calibration, then the prompts batch by batch."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from posleak.edits import NamedEdit, require_storable, unstorable
from posleak.errors import NoEffectError, RunError, StorageError, warn
from posleak.files import sole_writer
from posleak.inputs import GivenPrompts, InputFacts, Prompts, prepare, repeat_notes
from posleak.leakage import MIN_PROMPTS
from posleak.models import Subject
from posleak.models.identity import config_sha256
from posleak.models.parallel import ALONE, Ranks
from posleak.models.quantisation import require_convertible
from posleak.probe import Calibration, EditEffect, EditEffectRecorder, Motion, Observer, Placement, Plan, calibrate
from posleak.probe.fingerprint import changed, identified
from posleak.stopwatch import stage

from .folder import has_leftovers, has_record, remove_batches, remove_unwritten, require_unused
from .loop import BatchStore, Passes, resume_chunks
from .memory import calibration_length, memory_plan, within_memory
from .notes import require_finite_logits, result_notes, size_notes, unseen_metrics
from .placements import PlacementCache, placements_of
from .progress import OnProgress
from .record import Machine, Record, clear_run, digest, read_record, require_same
from .run import Run, assemble_run, meters_of
from .short_prompts import short_prompt_metrics
from .software import now, slug, versions
from .spec import MeasureSpec, parse_bytes

OnPrompts = Callable[[int, int], None]
"""Callback that receives (finished prompts, total prompts)."""


@dataclass(frozen=True)
class PreparedRun:
    """A measurement that is ready to start: everything that can be checked without a forward pass is checked.

    requested         the spec as requested;  spec: with every default filled in
    base              prompts before edits
    notes             warnings that are known before the run
    observers         see the attention calls of every batch after posleak's own observers
    placement_cache   placements that were read from this model already;  fit_cache: fits of edits on this model
    """

    subject: Subject
    requested: MeasureSpec
    spec: MeasureSpec
    base: Prompts
    notes: tuple[str, ...]
    observers: tuple[Observer, ...] = ()
    placement_cache: PlacementCache = field(default_factory=dict, repr=False, compare=False)
    fit_cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        subject: Subject,
        spec: MeasureSpec,
        given: GivenPrompts | None = None,
        max_memory: str | int | None = None,
        base: Prompts | None = None,
        observers: tuple[Observer, ...] = (),
        placement_cache: PlacementCache | None = None,
        fit_cache: dict[Any, Any] | None = None,
    ) -> PreparedRun:
        """Prepare a measurement; the subject's identity is computed again.

        given             prompts that the user passed
        max_memory        memory limit of the process, as in `measure`: batches are chosen to fit
        base              prompts that another run of this subject has prepared
        placement_cache   placements that such a run has read;  fit_cache: its fits of edits
        """
        if config_sha256(subject.model.config) != subject.identity.config_sha256:
            subject = subject.current()  # the checks must be about the model as it is now
        spec.require_effect()
        resolved = within_memory(spec, subject, parse_bytes(max_memory))
        notes = list(size_notes(subject, resolved))
        if base is None:
            with stage("prompts"):
                inputs = spec.inputs if given is None else given
                base = prepare(subject, inputs, bos=spec.bos, length=spec.length, seed=spec.seed)
                notes += repeat_notes(base, spec.prompts)
        notes += [] if base.caution is None else [base.caution]
        with stage("identity"):
            subject = identified(subject)
        for edit in spec.edits:
            require_convertible(subject.model, edit.weights_dtype, edit.text)
        if spec.loss:
            require_finite_logits(subject)
        caches = ({} if cache is None else cache for cache in (placement_cache, fit_cache))
        return cls(subject, spec, resolved, base, tuple(notes), observers, *caches)

    @cached_property
    def edits(self) -> tuple[NamedEdit, ...]:
        """The edits of the spec, fitted to the model."""
        spec = self.spec
        return tuple(edit.prepared(self.subject, self.base, spec.origin, self.fit_cache) for edit in spec.edits)

    @cached_property
    def prompts(self) -> Prompts:
        """Return what the model reads: the prompts after the edits that change tokens."""
        prompts = self.base
        for edit in self.spec.edits:
            prompts = edit.prompts(prompts)
        return prompts

    @property
    def split(self) -> Ranks:
        """Return the processes that share the batches: those that hold the whole model each."""
        return self.subject.ranks if self.subject.splits_prompts else ALONE

    @property
    def _first(self) -> NDArray[np.int64]:
        """Return the first prompt [1, T]."""
        return self.prompts.batch([0])

    @cached_property
    def inputs(self) -> InputFacts:
        """Return the description of the prompts for the record."""
        return self.prompts.describe()

    @cached_property
    def digest(self) -> str:
        """Return the hash of everything that determines the results; unique if a record cannot hold an edit."""
        salt = secrets.token_hex(8) if unstorable(self.spec.edits) else ""
        return digest(self.spec, self.subject.identity, self.inputs, versions(), salt)

    @property
    def folder_name(self) -> str:
        """Return MODEL-DIGEST: the same measurement has the same folder."""
        return f"{slug(self.subject.identity.name)}-{self.digest[:10]}"

    def run(
        self,
        folder: Path | None = None,
        *,
        fresh: bool = False,
        calibration: Calibration | None = None,
        progress: OnPrompts = lambda done, of: None,
        on_progress: OnProgress | None = None,
    ) -> Run:
        """Measure, resume the unfinished run in `folder`, or load the finished one.

        Only one thread of one process at a time can measure into a folder.

        fresh         discard results in the folder and measure again
        calibration   of this subject, if it is known
        progress      receives the number of finished prompts after every batch
        on_progress   receives the progress after every attention call
        """
        if folder is None:
            return self._measure(None, None, calibration, progress, on_progress)
        if not fresh and (stored := self._with_stored_metrics(folder)) is not self:
            return stored.run(folder, calibration=calibration, progress=progress, on_progress=on_progress)
        require_storable(self.spec.edits, str(folder))
        if self.observers and not fresh and has_record(folder):
            raise RunError(
                "the folder contains prompts that are already measured, which the observers would not receive",
                where=str(folder), remedy="pass --fresh to measure them again, or another --out",
            )  # fmt: skip
        if not fresh and (finished := self._finished(folder)) is not None:
            return finished
        with sole_writer(folder):
            if fresh:
                clear_run(folder)
            elif (finished := self._finished(folder)) is not None:  # another process finished it in the meantime
                return finished
            remove_unwritten(folder)
            earlier = read_record(folder) if has_record(folder) else None
            return self._measure(folder, earlier, calibration, progress, on_progress)

    def run_with_warnings(
        self, folder: Path | None = None, *, fresh: bool = False, progress: OnPrompts = lambda done, of: None,
        on_progress: OnProgress | None = None,
    ) -> Run:  # fmt: skip
        """Call `run` and issue the notes as warnings: those known beforehand at once, those about results after it."""
        for note in self.notes:
            warn(note)
        run = self.run(folder, fresh=fresh, progress=progress, on_progress=on_progress)
        for note in run.record.warnings:
            if note not in self.notes:
                warn(note)
        return run

    def _with_stored_metrics(self, folder: Path) -> PreparedRun:
        """Return this run with the metrics of the folder's run, if this one has none: its results are part of those."""
        if self.spec.metrics or not has_record(folder):
            return self
        metrics = read_record(folder).spec.metrics
        return replace(self, spec=replace(self.spec, metrics=metrics)) if metrics else self

    def _finished(self, folder: Path) -> Run | None:
        """Return the finished run in the folder; raise a RunError if the folder holds another measurement."""
        if not has_record(folder):
            require_unused(folder)
            return None
        earlier = read_record(folder)
        require_same(folder, earlier, self.spec, self.subject.identity, self.inputs)
        if earlier.finished is None:
            return None
        run = Run.load(folder)
        if has_leftovers(folder):
            with suppress(StorageError), sole_writer(folder):  # not worth an error: the run is complete
                remove_batches(folder)
                remove_unwritten(folder)
        return run

    def _measure(
        self, folder: Path | None, earlier: Record | None, calibration: Calibration | None, progress: OnPrompts,
        on_progress: OnProgress | None,
    ) -> Run:  # fmt: skip
        """Measure the batches that `folder` does not have; `earlier`: the record of the run that is resumed."""
        if calibration is None:
            with stage("calibration"):
                calibration = calibrated(self.subject, self._first)
        for edit in self.spec.edits:
            edit.require_within(calibration)
        placements = self.placements()
        placed = [self._placed_calls(placements, edit) for edit in self.spec.edits]
        record = self._record(calibration, placements, earlier)

        def write_effects(recorders: list[EditEffectRecorder]) -> None:
            nonlocal record
            record = replace(record, touched=self._effects(recorders, placed, calibration))
            if folder is not None:
                record.write(folder)

        if folder is not None:
            record.write(folder)
        passes = Passes(
            self.subject.model, self.spec.plan, self.edits, placements, self.observers, meters_of(self.spec),
            self.spec.loss, len(calibration.heads), write_effects,
        )  # fmt: skip
        store, chunks = BatchStore(folder, self.digest, calibration.heads), []
        with self._batches_of_one_model(folder), closing(
            resume_chunks(passes, self.prompts, self.spec.batches(), store, on_progress, self.split)
        ) as measured:  # fmt: skip
            for batch, chunk in measured:
                chunks.append(chunk)
                progress(batch.stop, self.spec.prompts)
        short, notes = short_prompt_metrics(self.subject, replace(self.spec, edits=self.edits), self.prompts)
        with stage("identity"):
            record = replace(record, changed=changed(self.subject))
        with stage("metrics"):
            data = assemble_run(chunks, self.spec, calibration.numbers, passes.meters, short)
        return _finish(Run(record, data, folder), [*unseen_metrics(passes.meters, chunks[0]), *notes])

    @contextmanager
    def _batches_of_one_model(self, folder: Path | None) -> Iterator[None]:
        """Remove finished batches after an error if the model has changed: they may be of another model."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # do not hide the error itself
                if folder is not None and changed(self.subject) is not None:
                    remove_batches(folder)
            raise

    def placements(self) -> list[Placement]:
        """Return the effect of positions in every layer under the edits; it is read from the model at most once."""
        return [_scaled(place, self.spec.edits, self.spec.plan) for place in self._read_placements(self.spec.edits)]

    def _read_placements(self, edits: Sequence[NamedEdit], ids: NDArray[np.int64] | None = None) -> list[Placement]:
        """Return the placements under these edits, from the cache or read on the first prompt, ids [1, T]."""
        ids, placing = self._first if ids is None else ids, tuple(edit for edit in edits if edit.placing)
        if (key := (placing, ids.tobytes())) not in self.placement_cache:
            donor = ids.shape[1] - self.spec.length
            alone = self._read_placements(edits, ids[:, donor:]) if donor else None
            self.placement_cache[key] = placements_of(self.subject.model, ids, self.spec.plan, edits, alone)
        return self.placement_cache[key]

    def _placed_calls(self, placements: list[Placement], edit: NamedEdit) -> list[int]:
        """Return the calls in which a placing edit changes the effect of positions."""
        if not edit.placing:
            return []
        others = [other for other in self.spec.edits if other is not edit]
        return edit.placed(self._read_placements(others), placements)

    def _effects(
        self, recorders: list[EditEffectRecorder], placed: list[list[int]], calibration: Calibration
    ) -> tuple[EditEffect, ...]:  # fmt: skip
        """Return what each edit changed, tokens and positions included; raise a NoEffectError if it changed nothing."""
        edits, few = self.spec.edits, range(min(self.spec.prompts, MIN_PROMPTS))
        for edit, recorder, calls in zip(edits, recorders, placed, strict=True):
            if not np.array_equal(edit.prompts(self.base).batch(few), self.base.batch(few)):
                recorder.note("the tokens")
            recorder.calls |= {call: (calibration.numbers[call], calibration.heads[call]) for call in calls}
        effects = tuple(recorder.effect(edit.text) for edit, recorder in zip(edits, recorders, strict=True))
        for edit, effect in zip(edits, effects, strict=True):
            if effect.nothing and not edit.is_control:
                raise NoEffectError(
                    "the edit has no effect on this model: results would equal those without the edit",
                    where=f"{self.subject.identity.name}, --edit {effect.edit}",
                    remedy="omit the edit, or change its value or scope (docs/edits.md)",
                )  # fmt: skip
        return effects

    def _record(self, calibration: Calibration, placements: list[Placement], earlier: Record | None) -> Record:
        """Return the record at the start. A resumed run keeps the effects of its edits, known from its first batch."""
        plan, motion = self.spec.plan, Motion.of(placements, self.spec.plan, self.subject.dtype)
        return Record(
            digest=self.digest, asked=self.requested, spec=self.spec, plan=plan, identity=self.subject.identity,
            inputs=self.inputs, calibration=calibration, motion=motion, memory=memory_plan(self.subject, self.spec),
            versions=versions(), machine=Machine.of(self.subject), warnings=self.notes,
            created=now() if earlier is None else earlier.created, touched=() if earlier is None else earlier.touched,
        )  # fmt: skip


def _finish(run: Run, notes: Sequence[str]) -> Run:
    """Write the results, then the record of the finished run, and only then remove the batches."""
    with stage("summary"):
        _ = run.summary
    notes, files = [*result_notes(run), *notes, *filter(None, [run.record.changed])], {}
    if run.path is not None:
        with stage("write"):
            files = run.write_results(run.path)
    finished = run.under(
        replace(run.record, finished=now(), files=files, warnings=(*run.record.warnings, *notes))
    )  # fmt: skip
    if finished.path is not None:
        finished.record.write(finished.path)
        remove_batches(finished.path)
    return finished


def _scaled(place: Placement, edits: Sequence[NamedEdit], plan: Plan) -> Placement:
    """Return the placement with the factors that edits put on queries by position."""
    for edit in edits:
        if (more := edit.temperature(plan.rows, plan.length)) is not None:
            own = torch.ones(len(plan.rows), dtype=torch.float64) if place.temperature is None else place.temperature
            place = replace(place, temperature=own * more.to(own))
    return place


def calibrated(subject: Subject, ids: NDArray[np.int64]) -> Calibration:
    """Calibrate on the first tokens of the first prompt of ids [B, T]; raise a CheckError if a check fails."""
    start = torch.from_numpy(ids[:1, : calibration_length(subject)]).to(subject.device)
    return calibrate(subject.model, start).require(subject.identity.name)
