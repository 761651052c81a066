"""One subject under many conditions: the same prompts under different edits, each an ordinary run, measured once.

Everything is paired: every condition reads the same prompts. With a folder, conditions are kept below it as runs, and
are read back when the work is started again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from posleak.edits import NamedEdit, parse_edits
from posleak.errors import CheckError
from posleak.files import is_posleak_file, remove_posleak_file, sole_writer
from posleak.inputs import GivenPrompts, Prompts
from posleak.models import Subject
from posleak.probe import Plan
from posleak.probe.fingerprint import behaviour_difference

from .folder import HEADS_FILE, RECORD_FILE, RESULTS_FILE, remove_if_empty, remove_unwritten, require_unused
from .measure import PreparedRun, chosen_folder
from .progress import OnProgress
from .record import clear_run
from .run import Run
from .software import slug
from .spec import MeasureSpec

CONDITIONS = "conditions"
"""Where a folder keeps the runs of its conditions."""

METRICS = "metrics"
"""The condition that is the baseline itself, measured with what other papers measure."""


@dataclass
class Conditions:
    """`run(*edits)` is a measurement; `run()` is the baseline that all others are compared with. With a folder, use it
    inside `writing()`. `given`: prompts that were handed over. `extra_files`: further files that this work keeps in the
    folder."""

    extra_files: ClassVar[tuple[str, ...]] = ()

    subject: Subject
    spec: MeasureSpec
    folder: Path | None = None
    fresh: bool = False
    max_memory: str | int | None = None
    progress: Callable[[str], None] = lambda what: None
    given: GivenPrompts | None = None
    _runs: dict[tuple[str, ...], Run] = field(default_factory=dict)

    @cached_property
    def baseline(self) -> PreparedRun:
        """The measurement without edits, made ready."""
        return PreparedRun.of(self.subject, self.spec, self.given, self.max_memory)

    def choose_folder(self, out: str | Path | None, root: str | Path | None, prefix: str = "") -> None:
        """Use the folder `out`, or one below `root` that is named after the baseline, or none if neither is given."""
        self.folder = chosen_folder(out, root, lambda: prefix + self.baseline.folder_name)

    @property
    def plan(self) -> Plan:
        return self.spec.plan

    @property
    def tokens(self) -> Prompts:
        return self.baseline.base

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """The baseline's prompts [B, T]."""
        return self.tokens.batch(range(self.spec.prompts))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the folder while work goes on there, ready to be filled; with `fresh`, what is there is removed first.

        A folder that cannot be written is read: if it is complete, nothing else is needed.
        """
        if self.folder is None or not (self.fresh or _writable(self.folder)):
            yield
            return
        with sole_writer(self.folder):
            if not (self.folder / RECORD_FILE).exists():
                require_unused(self.folder, self.extra_files)
            if self.fresh:
                self.clear(self.folder)
            remove_unwritten(self.folder, (RECORD_FILE, RESULTS_FILE, HEADS_FILE, *self.extra_files))
            yield

    def clear(self, folder: Path) -> None:
        """Remove what earlier work wrote, and no other files; the baseline goes last."""
        if not (folder / RECORD_FILE).exists():
            return
        for name in self.extra_files:
            remove_posleak_file(folder / name)
        for record in sorted((folder / CONDITIONS).glob(f"*/{RECORD_FILE}")):
            if is_posleak_file(record):
                clear_run(record.parent)
                remove_if_empty(record.parent)
        remove_if_empty(folder / CONDITIONS)
        clear_run(folder)

    def run(self, *edits: str) -> Run:
        """The run under these edits: from memory, from its folder, or measured now."""
        parsed = parse_edits(edits)
        key = tuple(edit.text for edit in parsed)
        if key not in self._runs:
            name = ", ".join(key) or "baseline"
            self.progress(name)
            self._runs[key] = self._measured(parsed, lambda reached: self.progress(f"{name}: {reached.text}"))
        return self._runs[key]

    def _measured(self, edits: tuple[NamedEdit, ...], on_progress: OnProgress) -> Run:
        """Conditions share the baseline's prompts and calibration; warnings are issued once, for the baseline."""
        if not edits:
            return self.baseline.run_with_warnings(self.folder, on_progress=on_progress)
        spec = replace(self.spec, edits=edits, metrics=(), loss=False)  # others' metrics are of the baseline
        spec = replace(spec, loss=self.spec.loss and not spec.borrowed)
        return self.condition(spec, "+".join(spec.edit_texts), on_progress)

    def condition(self, spec: MeasureSpec, name: str, on_progress: OnProgress) -> Run:
        """The baseline's prompts measured as `spec` says; with a folder, kept below it by this name."""
        before = self.baseline.subject
        ready = PreparedRun.of(
            before, spec, max_memory=self.max_memory, base=self.tokens, placement_cache=self.baseline.placement_cache
        )
        if gap := behaviour_difference(before.identity, ready.subject.identity):
            raise CheckError(
                "the model has changed since its baseline was measured", where=name, got=gap,
                remedy="start again with the model as it is",
            )  # fmt: skip
        known = self.run().record.calibration
        place = None if self.folder is None else condition_folder(self.folder, name)
        return ready.run(place, calibration=known, on_progress=on_progress)


def condition_folder(folder: Path, *edits: str) -> Path:
    """Where a folder keeps the run under these edits."""
    return folder / CONDITIONS / slug("+".join(edits))


def _writable(folder: Path) -> bool:
    return not os.path.exists(folder) or os.access(folder, os.W_OK)
