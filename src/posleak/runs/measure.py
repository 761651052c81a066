"""One measurement from beginning to end: checks first, then calibration, then prompts, each kept when it is done."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from posleak.errors import InputError, PosleakWarning, StorageError
from posleak.files import sole_writer
from posleak.inputs import InputFacts, Prompts, prepare
from posleak.leakage import FEWEST, assemble, narrow_layers
from posleak.leakage.profile import AFTER, TIMES
from posleak.models import Subject
from posleak.probe import Calibration, Motion, calibrate
from posleak.probe.experts import ungrouped
from posleak.probe.plan import ORIGIN
from posleak.stopwatch import stage

from .folder import RECORD, has_leftovers, remove_batches, remove_unwritten, require_unused
from .loop import kept_chunks, placements_of
from .memory import calibration_length, memory_plan, parse_bytes, within_memory
from .record import Machine, Record, clear_run, digest, now, read_record, require_same, slug, versions
from .run import Run
from .spec import GIVEN, LENGTH, PROMPTS, MeasureSpec

Progress = Callable[[int, int], None]
"""(prompts done, prompts in all)"""


def measure(
    subject: Subject,
    inputs: str | NDArray[np.int64] = "random",
    *,
    length: int = LENGTH,
    prompts: int = PROMPTS,
    seed: int = 0,
    bos: str | int = "auto",
    batch: int = 0,
    density: int = 1,
    origin: int = ORIGIN,
    edits: Sequence[str] | str = (),
    out: str | Path | None = None,
    fresh: bool = False,
    max_memory: str | int | None = None,
    progress: Progress = lambda done, of: None,
) -> Run:
    """Measure a subject's leakage of absolute position, split into mask, drift and sink.

    inputs      what it reads: random, constant[:ID], text:PATH, text:stdlib, or a table of ids [B, T]
    length      tokens per prompt, position 0 included;  prompts: how many;  seed: of the tokens
    bos         position 0: auto (what the config names as BOS), tokenizer, none, or a token
    batch       prompts at once (0: about 4096 tokens);  density: refines the plan of sampled rows
    origin      width of the origin: how many first tokens count as it
    edits       what if: texts such as "window=64" (docs/edits.md)
    out         a folder for the run: an unfinished one there is resumed, a finished one of the same measurement is read
                back, and `fresh` measures again. Without `out` the run stays in memory
    max_memory  what the process may hold, the loaded model included ("8GB", or bytes): batches are chosen to stay
                within it, or the measurement is refused before it starts
    """
    ids = None if isinstance(inputs, str) else np.asarray(inputs)
    if ids is not None:
        prompts, length = len(ids), ids.shape[-1]
    named, texts = inputs if isinstance(inputs, str) else GIVEN, (edits,) if isinstance(edits, str) else tuple(edits)
    spec = MeasureSpec(named, bos, length, prompts, seed, batch, density, origin, texts)
    ready = Measurement.of(subject, spec, ids, max_memory)
    return ready.run_with_warnings(None if out is None else Path(out), fresh=fresh, progress=progress)


@dataclass(frozen=True)
class Measurement:
    """A measurement that is ready to run: everything that can be checked without a forward pass has been checked.

    asked     as it was asked for;  spec: with every default filled in
    base      the prompts before edits;  notes: what the user should know
    """

    subject: Subject
    asked: MeasureSpec
    spec: MeasureSpec
    base: Prompts
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        subject: Subject,
        spec: MeasureSpec,
        ids: NDArray[np.int64] | None = None,
        max_memory: str | int | None = None,
        base: Prompts | None = None,
    ) -> Measurement:
        """`ids` are prompts that were given; `base` are prompts that another measurement of this spec has prepared."""
        resolved = within_memory(spec, subject, parse_bytes(max_memory))
        if base is None:
            with stage("prompts"):
                inputs = spec.inputs if ids is None else ids
                base = prepare(subject, inputs, bos=spec.bos, length=spec.length, seed=spec.seed)
        return cls(subject, spec, resolved, base, tuple(size_notes(subject, resolved)))

    @cached_property
    def prompts(self) -> Prompts:
        """What the model will read: the prompts after the edits that change tokens."""
        prompts = self.base
        for edit in self.spec.parsed_edits:
            prompts = edit.prompts(prompts)
        return prompts

    @cached_property
    def inputs(self) -> InputFacts:
        return self.prompts.describe()

    @cached_property
    def digest(self) -> str:
        return digest(self.spec, self.subject.identity, self.inputs, versions())

    @property
    def folder_name(self) -> str:
        """MODEL-DIGEST: the same measurement finds the same folder."""
        return f"{slug(self.subject.identity.name)}-{self.digest[:10]}"

    def run(
        self,
        folder: Path | None = None,
        *,
        fresh: bool = False,
        calibration: Calibration | None = None,
        progress: Progress = lambda done, of: None,
    ) -> Run:
        """Measure, or read back or resume what the folder has; `calibration`: this subject's, if known already.

        One process and one thread at a time may measure into a folder.
        """
        if folder is None:
            return self._measured(None, now(), calibration, progress)
        if not fresh and (found := self._kept(folder)) is not None:
            return found
        with sole_writer(folder):
            if fresh:
                clear_run(folder)
            found = None if fresh else self._kept(folder)  # somebody else may have finished it in the meantime
            return found or self._measured(folder, self._created(folder), calibration, progress)

    def _measured(
        self, folder: Path | None, created: str, calibration: Calibration | None, progress: Progress
    ) -> Run:  # fmt: skip
        if calibration is None:
            with stage("calibration"):
                calibration = calibrated(self.subject, self.prompts.batch([0]))
        placements = placements_of(self.subject.model, self.prompts.batch([0]), self.spec.plan, self.spec.parsed_edits)
        motion = Motion.of(placements, self.spec.plan, self.subject.dtype)
        record = self._record(calibration, motion, created)
        if folder is not None:
            record.write(folder)
        chunks, plan = [], self.spec.plan
        with closing(
            kept_chunks(
                self.subject.model, self.prompts, self.spec.batches(), plan, folder=folder, layers=calibration.layers,
                edits=self.spec.parsed_edits, placements=placements,
            )
        ) as measured:  # fmt: skip
            for at, chunk in measured:
                chunks.append(chunk)
                progress(at.stop, self.spec.prompts)
        return _finished(Run(record, assemble(chunks, plan), folder))

    def run_with_warnings(
        self, folder: Path | None = None, *, fresh: bool = False, progress: Progress = lambda done, of: None
    ) -> Run:
        """`run`, with its notes issued as warnings: those known beforehand at once, those about numbers after it."""
        for note in self.notes:
            warnings.warn(note, PosleakWarning, stacklevel=3)
        run = self.run(folder, fresh=fresh, progress=progress)
        for note in run.record.warnings:
            if note not in self.notes:
                warnings.warn(note, PosleakWarning, stacklevel=3)
        return run

    def _kept(self, folder: Path) -> Run | None:
        """The finished run of this measurement that the folder has. Another measurement there is an error."""
        if not (folder / RECORD).exists():
            require_unused(folder)
            return None
        earlier = read_record(folder)
        require_same(folder, earlier, self.spec, self.subject.identity, self.inputs)
        if earlier.finished is None:
            return None
        run = Run.load(folder)
        if has_leftovers(folder):
            with suppress(StorageError), sole_writer(folder):  # not worth an error: the run is whole
                remove_batches(folder)
                remove_unwritten(folder)
        return run

    def _created(self, folder: Path) -> str:
        """When the unfinished run in the folder was begun: now, if there is none. Leftovers of its end are removed."""
        remove_unwritten(folder)
        return read_record(folder).created if (folder / RECORD).exists() else now()

    def _record(self, calibration: Calibration, motion: Motion, created: str) -> Record:
        return Record(
            digest=self.digest, asked=self.asked, spec=self.spec, plan=self.spec.plan, identity=self.subject.identity,
            inputs=self.inputs, calibration=calibration, motion=motion, memory=memory_plan(self.subject, self.spec),
            versions=versions(), machine=Machine.of(self.subject), warnings=self.notes, created=created,
        )  # fmt: skip


def _finished(run: Run) -> Run:
    """Write the results, then the record that says that the run is finished, and only then remove the batches."""
    with stage("summary"):
        _ = run.summary
    notes = [*_narrow_note(run), *_stays_note(run)]
    files = {}
    if run.path is not None:
        with stage("write"):
            files = run.write_results(run.path)
    done = run.under(run.record.ended(files, notes))
    if done.path is not None:
        done.record.write(done.path)
        remove_batches(done.path)
    return done


def _narrow_note(run: Run) -> list[str]:
    """Says where the sink is wider than the origin, and which origin would do."""
    origin = run.record.plan.origin
    if not (narrow := narrow_layers(run.data, origin)):
        return []
    where = f"layer{'s' if len(narrow) > 1 else ''} {', '.join(map(str, narrow))}"
    return [
        f"the origin of {origin} token{'s' if origin > 1 else ''} is too narrow in {where}: late queries attend to the "
        f"{AFTER} keys after it more than {TIMES:g} times as much as to ordinary ones; use --origin "
        f"{max(narrow.values())}"
    ]


def _stays_note(run: Run) -> list[str]:
    """Says where the origin could not be moved."""
    motion = run.record.motion
    if not motion.stays:
        return []
    where = "every layer" if len(motion.stays) == len(motion.layers) else f"layers {', '.join(map(str, motion.stays))}"
    return [f"the origin's keys cannot be moved in {where} and stay where they are in the crop: {motion.why}"]


def calibrated(subject: Subject, ids: NDArray[np.int64]) -> Calibration:
    """Calibrate on the start of the first of ids [B, T]; an error if a check fails."""
    start = torch.from_numpy(ids[:1, : calibration_length(subject)]).to(subject.device)
    return calibrate(subject.model, start).require(subject.identity.name)


def size_notes(subject: Subject, spec: MeasureSpec) -> Iterator[str]:
    """Refuse prompts that are too long; say of others that they are long, too short for a window, or too few."""
    context, read = subject.context, spec.length + spec.borrowed
    if context is not None and read > context:
        borrowed = f" after a context of {spec.borrowed}" if spec.borrowed else ""
        what = f"length {spec.length}{borrowed} is beyond the model's context of {context} positions"
        if not subject.identity.rotary:
            raise InputError(what, where=subject.identity.name, remedy=f"use --length {context} or less")
        yield f"{what}: what is measured there is extrapolation"
    if (window := min((w for w in subject.identity.windows if w is not None), default=0)) >= spec.length:
        yield (
            f"the sliding window of {window} tokens is longer than the prompts: it hides nothing, and windowed layers "
            f"are measured as if they saw everything; use --length {2 * window} or more to see the window"
        )
    dtype = next((edit.weights_dtype for edit in spec.parsed_edits if edit.weights_dtype), subject.dtype)
    if ungrouped(subject.model, dtype):
        yield (
            f"torch has no grouped products of experts in {str(dtype).removeprefix('torch.')}: experts are multiplied "
            "one after the other, which takes longer and changes nothing else"
        )
    if spec.prompts < FEWEST:
        powers = "powers and intervals" if spec.prompts < 2 else "intervals"
        yield (
            f"too few prompts, {spec.prompts}: noise cannot be told from signal, so there are no {powers}; use "
            f"--prompts {FEWEST} or more"
        )
