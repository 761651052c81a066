"""One subject under several conditions: the same prompts under different edits, each a run that is measured once.

Conditions are paired: all read the same prompts. With a folder, each is stored as a run below it and loaded when the
work is resumed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from posleak.edits import NamedEdit, parse_edits
from posleak.errors import CheckError
from posleak.files import is_posleak_file, remove_posleak_file, sole_writer
from posleak.inputs import GivenPrompts, Inputs, Prompts
from posleak.models import AnyModel, Subject
from posleak.probe.fingerprint import behaviour_difference

from .folder import RECORD_FILE, chosen_folder, clear_steps, remove_if_empty, remove_unwritten, require_unused
from .prepared import PreparedRun
from .progress import OnProgress
from .record import clear_run
from .run import Run
from .software import slug
from .spec import MeasureSpec, resolve_request

CONDITIONS = "conditions"
"""Folder of the conditions' runs, below the baseline's folder."""

METRICS = "metrics"
"""Name of the condition that is the baseline measured with the metrics of other papers."""


@dataclass
class Conditions:
    """The conditions of one subject: `run()` is the baseline, `run(*edits)` the run with these edits added.

    With a folder, use it inside `writing()`.

    given         prompts that the user passed
    progress      callback that receives a status line
    extra_files   further files that the work writes into the folder
    """

    extra_files: ClassVar[tuple[str, ...]] = ()

    subject: Subject
    spec: MeasureSpec
    folder: Path | None = None
    fresh: bool = False
    max_memory: str | int | None = None
    progress: Callable[[str], None] = lambda what: None
    given: GivenPrompts | None = None
    _runs: dict[tuple[str, ...], Run] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        subject: AnyModel,
        inputs: Inputs,
        *,
        out: str | Path | None,
        root: str | Path | None,
        prefix: str = "",
        fresh: bool,
        max_memory: str | int | None,
        progress: Callable[[str], None] | None,
        **request: Any,
    ) -> Self:
        """Return the conditions that the arguments of `trace`, `claims` or `advise` describe.

        out, root   the folder is `out`; or root/NAME, where NAME is `prefix` and the baseline's MODEL-DIGEST; or none
        request     further arguments of `resolve_request`
        """
        loaded, spec, given = resolve_request(subject, inputs, max_memory=max_memory, **request)
        conditions = cls(loaded, spec, None, fresh, max_memory, progress or (lambda line: None), given)
        conditions.folder = chosen_folder(
            out, root, lambda: prefix + conditions.baseline.folder_name, loaded.ranks, fresh=fresh
        )
        return conditions

    @cached_property
    def baseline(self) -> PreparedRun:
        """The prepared baseline run. In `claims` and `advise` it has no edits."""
        return PreparedRun.of(self.subject, self.spec, self.given, self.max_memory)

    @property
    def tokens(self) -> Prompts:
        """Return the baseline's prompts."""
        return self.baseline.base

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """Return the ids of the baseline's prompts [B, T]."""
        return self.tokens.batch(range(self.spec.prompts))

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the folder during the work; with `fresh`, remove earlier runs first.

        A folder that is not writable is used without a lock: runs that are complete can be loaded.
        """
        if self.folder is None or not (self.fresh or _writable(self.folder)):
            yield
            return
        with sole_writer(self.folder):
            if not (self.folder / RECORD_FILE).exists():
                require_unused(self.folder, self.extra_files)
            if self.fresh:
                self.clear(self.folder)
            remove_unwritten(self.folder, self.extra_files)
            yield

    def clear(self, folder: Path) -> None:
        """Remove the files of earlier work, the baseline last; other files stay."""
        if not (folder / RECORD_FILE).exists():
            return
        for name in self.extra_files:
            remove_posleak_file(folder / name)
        for record in sorted((folder / CONDITIONS).glob(f"*/{RECORD_FILE}")):
            if is_posleak_file(record):
                clear_run(record.parent)
                remove_if_empty(record.parent)
        remove_if_empty(folder / CONDITIONS)
        clear_steps(folder)
        clear_run(folder)

    def run(self, *edits: str) -> Run:
        """Return the run under these edits: from memory, from its folder, or measured now.

        Warnings are issued for the baseline only.
        """
        parsed = parse_edits(edits)
        texts = tuple(edit.text for edit in parsed)
        if texts not in self._runs:
            self._runs[texts] = (
                self.condition(self._spec_under(parsed), *texts)
                if texts
                else self.baseline.run_with_warnings(self.folder, on_progress=self._started("baseline"))
            )
        return self._runs[texts]

    def _started(self, name: str) -> OnProgress:
        """Report the start of a run, and return a callback that reports its progress under this name."""
        self.progress(name)
        return lambda progress: self.progress(f"{name}: {progress.text}")

    def require_supported(self, *edits: str) -> None:
        """Raise an UnsupportedError if the model cannot be measured under these edits; nothing is measured.

        The placements that this reads are used again when the condition is measured.
        """
        spec = replace(self._spec_under(parse_edits(edits)), batch=self.baseline.spec.batch)
        replace(self.baseline, spec=spec).placements()

    def _spec_under(self, edits: tuple[NamedEdit, ...]) -> MeasureSpec:
        """Return the baseline's spec under further edits, without metrics, and a loss only where it is defined."""
        spec = replace(self.spec, edits=(*self.spec.edits, *edits), metrics=(), loss=False)
        return replace(spec, loss=self.spec.loss and not spec.borrowed)

    def condition(self, spec: MeasureSpec, *names: str) -> Run:
        """Measure the baseline's prompts under `spec`; with a folder, store the run below it by these names."""
        on_progress = self._started(name := ", ".join(names))
        baseline, subject = self.baseline, self.baseline.subject
        prepared = PreparedRun.of(
            subject, spec, None, self.max_memory, base=self.tokens, placement_cache=baseline.placement_cache,
            fit_cache=baseline.fit_cache,
        )  # fmt: skip
        if gap := behaviour_difference(subject.identity, prepared.subject.identity):
            raise CheckError(
                "the model has changed since its baseline was measured", where=name, got=gap,
                remedy="run the command again with the current model",
            )  # fmt: skip
        calibration = self.run().record.calibration
        folder = None if self.folder is None else condition_folder(self.folder, *names)
        return prepared.run(folder, calibration=calibration, on_progress=on_progress)


def condition_folder(folder: Path, *names: str) -> Path:
    """Return the folder of a condition: of the run under these edits, or of METRICS."""
    return folder / CONDITIONS / slug("+".join(names))


def _writable(folder: Path) -> bool:
    return not os.path.exists(folder) or os.access(folder, os.W_OK)
