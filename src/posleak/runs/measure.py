"""One measurement from beginning to end: checks first, then calibration, then prompts, each kept when it is done."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from posleak.axes import layer_names
from posleak.edits import NamedEdit, parse_edits, require_readable, unreadable
from posleak.errors import (
    BusyError,
    CheckError,
    InputError,
    NoEffectError,
    PosleakError,
    RunError,
    StorageError,
    shorter_prompts,
    warn,
)
from posleak.files import LOCK_FILE, file_lock, sole_writer
from posleak.inputs import GivenPrompts, InputFacts, Inputs, Prompts, prepare, repeat_notes
from posleak.inputs.prompts import DONOR_MARGIN
from posleak.leakage import MIN_PROMPTS, narrow_layers
from posleak.leakage.dataset import Chunk
from posleak.leakage.profile import KEYS_AFTER_ORIGIN, SINK_RATIO
from posleak.metrics import Meters
from posleak.metrics.names import parse_metrics
from posleak.models import AnyModel, Subject
from posleak.models.identity import config_sha256
from posleak.probe import (
    Calibration,
    Edit,
    EditEffect,
    EditEffectRecorder,
    Motion,
    Observer,
    Placement,
    Plan,
    calibrate,
)
from posleak.probe.experts import ungrouped
from posleak.probe.fingerprint import FINGERPRINT_TOKENS, changed, identified
from posleak.probe.plan import DEFAULT_ORIGIN
from posleak.signatures import checked
from posleak.stopwatch import stage

from .folder import RECORD_FILE, has_leftovers, has_record, remove_batches, remove_unwritten, require_unused
from .loop import kept_chunks, placements_of
from .memory import calibration_length, memory_plan, within_memory
from .progress import OnProgress
from .record import Machine, Record, clear_run, digest, is_finished, read_record, require_same
from .request import resolve_request
from .run import Run, assembled, meters_of
from .short_prompts import ShortPromptMetrics
from .software import now, slug, versions
from .spec import MeasureSpec, parse_bytes

PlacementCache = dict[tuple[tuple[NamedEdit, ...], bytes], list[Placement]]
"""Placements, by the edits that place queries and keys, and by the first prompt."""

OnPrompts = Callable[[int, int], None]
"""(prompts done, prompts in all)"""


@checked
def measure(
    subject: AnyModel,
    inputs: Inputs = "random",
    *,
    length: int | None = None,
    prompts: int | None = None,
    seed: int = 0,
    bos: str | int = "auto",
    batch: int = 0,
    density: int = 1,
    origin: int = DEFAULT_ORIGIN,
    edits: str | Edit | Iterable[str | Edit] = (),
    metrics: str | Iterable[str] = (),
    loss: bool = False,
    observers: Observer | Iterable[Observer] = (),
    out: str | Path | None = None,
    fresh: bool = False,
    max_memory: str | int | None = None,
    progress: OnPrompts | None = None,
) -> Run:
    """Measure a subject's leakage of absolute position, split into mask, drift and sink.

    subject     a Subject, a model of transformers, or what `load` takes: a built-in name, a folder, a file, a hub id
    inputs      what it reads: "random", "constant[:ID]", "text:PATH", "text:stdlib", "backcopy"; or prompts that you
                have: a table of ids [B, T], a text or a list of texts, a chat (a list of messages) or a list of chats
    length      tokens per prompt, position 0 included: 512; prompts that you have are cut to it; without it they must
                be equally long
    prompts     how many: 16; of prompts that you have the first ones, or all
    seed        of the tokens, and of what edits draw
    bos         position 0: "auto" (what the config names as BOS), "tokenizer", "none", or a token; texts get it put
                before them, ids and chats are read as they stand
    batch       prompts at once (0: about 4096 tokens)
    density     refines the plan of sampled rows
    origin      width of the origin: how many first tokens count as it
    edits       what if: texts such as "window=64" (docs/edits.md), or your own objects (posleak.probe.Edit)
    metrics     what others measure, on the same passes: "all", or names such as "sinks" (docs/metrics.md);
                `run.metrics` has the numbers
    loss        the next token's loss at the sampled positions, too: `run.loss`
    observers   your own: `observe(call, out)` is called for every attention call of every batch, in order, after edits
    out         a folder for the run: an unfinished one there is resumed, a finished one of the same measurement is read
                back. Without `out` the run stays in memory (`run.save` writes it)
    fresh       measure again what is in `out`
    max_memory  what the process may hold, the loaded model included ("8GB", or bytes): batches are chosen to stay
                within it, or the measurement is refused before it starts
    progress    called with (prompts done, prompts in all)
    """
    watching = own_observers(observers)
    found = resolve_request(
        subject, inputs, length=length, prompts=prompts, seed=seed, bos=bos, batch=batch, density=density,
        origin=origin, edits=parse_edits(edits), metrics=parse_metrics(metrics), loss=loss,
    )  # fmt: skip
    if out is not None:
        _require_idle(Path(out), fresh)
    ready = PreparedRun.of(found.subject, found.spec, found.given, max_memory, observers=watching)
    return ready.run_with_warnings(None if out is None else Path(out), fresh=fresh, progress=progress or _silent)


def _require_idle(folder: Path, fresh: bool) -> None:
    """Refuse a folder that another thread or process is measuring into, before waiting for the model."""
    try:
        if (folder / LOCK_FILE).exists() and (fresh or not is_finished(folder)):
            with file_lock(folder / LOCK_FILE, wait=False):
                pass
    except BusyError:
        raise
    except (PosleakError, OSError):
        pass  # the measurement itself reports it


def _silent(done: int, of: int) -> None:
    """No progress is shown."""


@dataclass(frozen=True)
class PreparedRun:
    """A measurement that is ready to run: everything that can be checked without a forward pass has been checked.

    asked     as it was asked for;  spec: with every default filled in
    base      the prompts before edits;  notes: what the user should know
    observers look at the calls of every batch that is measured, besides posleak's own
    placement_cache  what positions do in this model, by placing edits and first prompt, where it was read already
    """

    subject: Subject
    asked: MeasureSpec
    spec: MeasureSpec
    base: Prompts
    notes: tuple[str, ...]
    observers: tuple[Observer, ...] = ()
    placement_cache: PlacementCache = field(default_factory=dict, repr=False, compare=False)

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
    ) -> PreparedRun:
        """`given` are prompts that were handed over; `base` are those that another measurement of this spec has
        prepared, and `placement_cache` are placements that it has read. The identity of the subject is taken anew."""
        if config_sha256(subject.model.config) != subject.identity.config_sha256:
            subject = subject.current()  # what is checked now must be true of the model as it is
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
            now = identified(subject)
        if spec.loss:
            _require_logits(now)
        return cls(
            now, spec, resolved, base, tuple(notes), observers, {} if placement_cache is None else placement_cache
        )

    @cached_property
    def prompts(self) -> Prompts:
        """What the model will read: the prompts after the edits that change tokens."""
        prompts = self.base
        for edit in self.spec.edits:
            prompts = edit.prompts(prompts)
        return prompts

    @property
    def _first(self) -> NDArray[np.int64]:
        """The first prompt [1, T]."""
        return self.prompts.batch([0])

    @cached_property
    def inputs(self) -> InputFacts:
        return self.prompts.describe()

    @cached_property
    def digest(self) -> str:
        """Under an edit that cannot be made again from its text, no other run has the same."""
        once = secrets.token_hex(8) if unreadable(self.spec.edits) else ""
        return digest(self.spec, self.subject.identity, self.inputs, versions(), once)

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
        progress: OnPrompts = lambda done, of: None,
        on_progress: OnProgress | None = None,
    ) -> Run:
        """Measure, or read back or resume what the folder has; `calibration`: this subject's, if known already.

        `progress` is told of every batch, `on_progress` of every layer. One process and one thread at a time may
        measure into a folder.
        """
        if folder is None:
            return self._measured(None, now(), calibration, progress, on_progress)
        require_readable(self.spec.edits, str(folder))
        if self.observers and not fresh:
            _require_unseen(folder)
        if not fresh and (found := self._kept(folder)) is not None:
            return found
        with sole_writer(folder):
            if fresh:
                clear_run(folder)
            found = None if fresh else self._kept(folder)  # somebody else may have finished it in the meantime
            return found or self._measured(folder, self._created(folder), calibration, progress, on_progress)

    def _measured(
        self, folder: Path | None, created: str, calibration: Calibration | None, progress: OnPrompts,
        on_progress: OnProgress | None,
    ) -> Run:  # fmt: skip
        if calibration is None:
            with stage("calibration"):
                calibration = calibrated(self.subject, self._first)
        edits, plan = self.spec.edits, self.spec.plan
        for edit in edits:
            edit.require_within(calibration)
        placements = [_scaled(place, edits, plan) for place in self._placements(edits)]
        placed = [self._placed(placements, edit) for edit in edits]
        motion = Motion.of(placements, plan, self.subject.dtype)
        writing = _Writing(self._record(calibration, motion, created), folder)
        chunks, meters = [], meters_of(self.spec)
        with self._kept_if_unchanged(folder), closing(
            kept_chunks(
                self.subject.model, self.prompts, self.spec.batches(), plan, folder=folder, heads=calibration.heads,
                digest=self.digest, edits=edits, placements=placements, observers=self.observers, meters=meters,
                loss=self.spec.loss,
                touched=lambda touches: writing.touched(self._touched(touches, placed, calibration)),
                on_progress=on_progress,
            )
        ) as measured:  # fmt: skip
            for at, chunk in measured:
                chunks.append(chunk)
                progress(at.stop, self.spec.prompts)
        short = ShortPromptMetrics.of(self.subject, self.spec, self.prompts)
        with stage("identity"):
            writing.record = replace(writing.record, changed=changed(self.subject))
        with stage("metrics"):
            data = assembled(chunks, self.spec, calibration.numbers, short.arrays)
        return _finished(Run(writing.record, data, folder), [*_unseen_note(meters, chunks[0]), *short.notes])

    @contextmanager
    def _kept_if_unchanged(self, folder: Path | None) -> Iterator[None]:
        """Remove finished batches after an error if the model has changed: they may be of another one."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the error itself is what matters
                if folder is not None and changed(self.subject) is not None:
                    remove_batches(folder)
            raise

    def _placed(self, placements: list[Placement], edit: NamedEdit) -> list[int]:
        """The calls in which a placing edit changes what positions do."""
        if not edit.placing:
            return []
        others = [each for each in self.spec.edits if each is not edit]
        return edit.placed(self._placements(others), placements)

    def _placements(self, edits: Sequence[NamedEdit]) -> list[Placement]:
        """What positions do under these edits, read off the model once for the same first prompt and placing edits."""
        first, placing = self._first, tuple(edit for edit in edits if edit.placing)
        if (key := (placing, first.tobytes())) not in self.placement_cache:
            self.placement_cache[key] = placements_of(self.subject.model, first, self.spec.plan, edits)
        return self.placement_cache[key]

    def _touched(
        self, touches: list[EditEffectRecorder], placed: list[list[int]], calibration: Calibration
    ) -> tuple[EditEffect, ...]:  # fmt: skip
        """What each edit changed, tokens and positions included; an edit that changed nothing is an error."""
        edits, few = self.spec.edits, range(min(self.spec.prompts, MIN_PROMPTS))
        for edit, touch, calls in zip(edits, touches, placed, strict=True):
            if not np.array_equal(edit.prompts(self.base).batch(few), self.base.batch(few)):
                touch.note("the tokens")
            touch.calls |= {call: (calibration.numbers[call], calibration.heads[call]) for call in calls}
        found = tuple(touch.effect(edit.text) for edit, touch in zip(edits, touches, strict=True))
        for edit, each in zip(edits, found, strict=True):
            if each.nothing and not edit.null:
                raise NoEffectError(
                    "the edit changes nothing in this model, so that its numbers would be those without it",
                    where=f"{self.subject.identity.name}, --edit {each.edit}",
                    remedy="leave it out, or change what it names (docs/edits.md)",
                )  # fmt: skip
        return found

    def run_with_warnings(
        self, folder: Path | None = None, *, fresh: bool = False, progress: OnPrompts = lambda done, of: None,
        on_progress: OnProgress | None = None,
    ) -> Run:  # fmt: skip
        """`run`, with its notes issued as warnings: those known beforehand at once, those about numbers after it."""
        for note in self.notes:
            warn(note)
        run = self.run(folder, fresh=fresh, progress=progress, on_progress=on_progress)
        for note in run.record.warnings:
            if note not in self.notes:
                warn(note)
        return run

    def _kept(self, folder: Path) -> Run | None:
        """The finished run of this measurement that the folder has. Another measurement there is an error."""
        if not has_record(folder):
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
        return read_record(folder).created if (folder / RECORD_FILE).exists() else now()

    def _record(self, calibration: Calibration, motion: Motion, created: str) -> Record:
        return Record(
            digest=self.digest, asked=self.asked, spec=self.spec, plan=self.spec.plan, identity=self.subject.identity,
            inputs=self.inputs, calibration=calibration, motion=motion, memory=memory_plan(self.subject, self.spec),
            versions=versions(), machine=Machine.of(self.subject), warnings=self.notes, created=created,
        )  # fmt: skip


@dataclass
class _Writing:
    """The record of a run that is being measured, on disk as it changes; a resumed one keeps what its edits touched."""

    record: Record
    folder: Path | None

    def __post_init__(self) -> None:
        if self.folder is not None:
            earlier = read_record(self.folder).touched if (self.folder / RECORD_FILE).exists() else ()
            self._write(replace(self.record, touched=earlier))

    def touched(self, found: tuple[EditEffect, ...]) -> None:
        self._write(replace(self.record, touched=found))

    def _write(self, record: Record) -> None:
        self.record = record
        if self.folder is not None:
            record.write(self.folder)


def _finished(run: Run, more: Sequence[str] = ()) -> Run:
    """Write the results, then the record that says that the run is finished, and only then remove the batches."""
    with stage("summary"):
        _ = run.summary
    notes = [*_narrow_note(run), *_stays_note(run), *more, *filter(None, [run.record.changed])]
    files = {}
    if run.path is not None:
        with stage("write"):
            files = run.write_results(run.path)
    done = run.under(run.record.ended(files, notes))
    if done.path is not None:
        done.record.write(done.path)
        remove_batches(done.path)
    return done


def _unseen_note(meters: Meters | None, batch: Chunk) -> list[str]:
    """Says which of the metrics that were asked for found nothing to look at."""
    if meters is None or not (names := meters.unseen(batch)):
        return []
    return [
        f"metrics {', '.join(names)} are left out: the prompts are too short for a spectrum (wavelets), or the model's "
        "layers do not pass on one residual stream (massive, valley, probe)"
    ]


def _narrow_note(run: Run) -> list[str]:
    """Says where the sink is wider than the origin, and which origin would do."""
    origin = run.record.plan.origin
    if not (narrow := narrow_layers(run.data, origin)):
        return []
    names = layer_names(run.record.calibration.numbers)
    where = f"layer{'s' if len(narrow) > 1 else ''} {', '.join(names[call] for call in narrow)}"
    return [
        f"the origin of {origin} token{'s' if origin > 1 else ''} is too narrow in {where}: late queries attend to the "
        f"{KEYS_AFTER_ORIGIN} keys after it more than {SINK_RATIO:g} times as much as to ordinary ones; use --origin "
        f"{max(narrow.values())}"
    ]


def _stays_note(run: Run) -> list[str]:
    """Says where the origin could not be moved."""
    motion = run.record.motion
    if not motion.stays:
        return []
    names = layer_names(run.record.calibration.numbers)
    stays = ", ".join(names[call] for call in motion.stays)
    where = "every layer" if len(motion.stays) == len(motion.layers) else f"layers {stays}"
    return [f"the origin's keys cannot be moved in {where} and stay where they are in the crop: {motion.why}"]


def _scaled(place: Placement, edits: Sequence[NamedEdit], plan: Plan) -> Placement:
    """What positions do, with the factors that edits put on queries by position."""
    for edit in edits:
        if (more := edit.temperature(plan.rows, plan.length)) is not None:
            own = torch.ones(len(plan.rows), dtype=torch.float64) if place.temperature is None else place.temperature
            place = replace(place, temperature=own * more.to(own))
    return place


def own_observers(observers: Observer | Iterable[Observer]) -> tuple[Observer, ...]:
    """Observers that were given, one or several; what cannot observe is refused."""
    found = tuple(observers) if isinstance(observers, Iterable) else (observers,)
    for each in found:
        if isinstance(each, type) or not isinstance(each, Observer):
            raise InputError(
                "this is no observer", where="observers", got=f"{each!r:.80}",
                expected="an object with a method observe(call, out)",
                remedy=f"pass an object of the class: {each.__name__}()" if isinstance(each, type) else None,
            )  # fmt: skip
    return found


def _require_unseen(folder: Path) -> None:
    """Refuse a folder with results: observers would not see the calls that they are made of."""
    if has_record(folder):
        raise RunError(
            "the folder has prompts that are measured already: your observers would not see them", where=str(folder),
            remedy="pass fresh=True to measure them again, or another out",
        )  # fmt: skip


def _require_logits(subject: Subject) -> None:
    """Refuse to measure the loss of a model whose logits are not numbers."""
    total = (subject.identity.fingerprint or (0.0,))[-1]
    if not math.isfinite(total):
        raise CheckError(
            "the model's logits are not finite, so that it has no loss", where=subject.identity.name,
            got=f"log Σ exp(logits) is {total} after a prompt of {FINGERPRINT_TOKENS} tokens",
            remedy="measure it without --loss, or fetch its weights again if its head should be sound",
        )  # fmt: skip


def calibrated(subject: Subject, ids: NDArray[np.int64]) -> Calibration:
    """Calibrate on the start of the first of ids [B, T]; an error if a check fails."""
    start = torch.from_numpy(ids[:1, : calibration_length(subject)]).to(subject.device)
    return calibrate(subject.model, start).require(subject.identity.name)


def beyond_context(subject: Subject, spec: MeasureSpec) -> str | None:
    """Refuse positions that the model does not have; say of a rotary model that they are beyond what it has learnt."""
    context, read = subject.context, spec.length + spec.borrowed + spec.shifted
    if spec.shifted < 0 and not subject.identity.rotary:
        raise InputError("the shift leads to positions before 0", where=subject.identity.name, got=spec.shifted)
    if context is None or read <= context:
        return None
    after = f" after a context of {spec.borrowed}" if spec.borrowed else ""
    after += f", shifted by {spec.shifted}," if spec.shifted else ""
    what = f"length {spec.length}{after} is beyond the model's context of {context} positions"
    if not subject.identity.rotary:
        most = (context - DONOR_MARGIN) // 2 if spec.borrowed else context - spec.shifted
        raise InputError(what, where=subject.identity.name, remedy=shorter_prompts(most))
    return f"{what}: what is measured there is extrapolation"


def size_notes(subject: Subject, spec: MeasureSpec) -> Iterator[str]:
    """Refuse prompts that are too long; say of others that they are long, too short for a window, or too few."""
    if (long := beyond_context(subject, spec)) is not None:
        yield long
    if (window := min((w for w in subject.identity.windows if w is not None), default=0)) >= spec.length:
        yield (
            f"the sliding window of {window} tokens is longer than the prompts: it hides nothing, and windowed layers "
            f"are measured as if they saw everything; use --length {2 * window} or more to see the window"
        )
    dtype = next((edit.weights_dtype for edit in spec.edits if edit.weights_dtype), subject.dtype)
    if ungrouped(subject.model, dtype):
        yield (
            f"torch has no grouped products of experts in {str(dtype).removeprefix('torch.')}: experts are multiplied "
            "one after the other, which takes longer and changes nothing else"
        )
    if spec.prompts < MIN_PROMPTS:
        powers = "powers and intervals" if spec.prompts < 2 else "intervals"
        yield (
            f"too few prompts, {spec.prompts}: noise cannot be told from signal, so there are no {powers}; use "
            f"--prompts {MIN_PROMPTS} or more"
        )
