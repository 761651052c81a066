"""run.json as dataclasses: what was asked, of which model, on which tokens, with which software, and how it ended.

This is the one place that writes and reads run.json. All other code uses the fields of `Record`.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from posleak.errors import RunError
from posleak.files import Sealed, foreign_file_error, is_posleak_file
from posleak.inputs import InputFacts
from posleak.models import Identity, Subject
from posleak.probe import Calibration, EditEffect, Motion, Plan, Positions
from posleak.probe.fingerprint import fingerprint_difference
from posleak.typed import plain

from .folder import RECORD_FILE, remove_run, require_unused
from .memory import MemoryPlan
from .software import COMPUTED_WITH, DEFINITIONS_VERSION, measurement_hash, now, versions
from .spec import MeasureSpec

FORMAT_VERSION = 5

SUBJECT = (
    "weights_sha256", "config_sha256", "tokenizer_sha256", "code_sha256", "architecture", "dtype", "device", "adapters",
    "hooks",
)  # fmt: skip
"""Of all that is recorded about a model, what decides the numbers. The fingerprint is compared up to rounding."""


@dataclass(frozen=True)
class Machine:
    """What the numbers were computed on."""

    platform: str
    python: str
    device: str
    threads: int

    @classmethod
    def of(cls, subject: Subject) -> Machine:
        return cls(platform.platform(), platform.python_version(), str(subject.device), torch.get_num_threads())


@dataclass(frozen=True)
class Record:
    """One run.

    digest      the hash of everything that decides its numbers: runs with the same digest have the same numbers
    asked       the measurement as it was asked for;  spec: with every default filled in
    touched     what each edit changed, seen in the first batch
    finished    when it was finished; None while it runs
    files       sha256 of the files beside run.json, by name
    changed     how the model after the measurement differed from the one before it; None if it did not
    """

    digest: str
    asked: MeasureSpec
    spec: MeasureSpec
    plan: Plan
    identity: Identity
    inputs: InputFacts
    calibration: Calibration
    motion: Motion
    memory: MemoryPlan
    versions: dict[str, str]
    machine: Machine
    warnings: tuple[str, ...]
    created: str
    touched: tuple[EditEffect, ...] = ()
    finished: str | None = None
    files: dict[str, str] = field(default_factory=dict)
    definitions_version: int = DEFINITIONS_VERSION
    changed: str | None = None

    @property
    def positions(self) -> Positions:
        """How the model told positions apart in this run."""
        return Positions.of(self.motion, self.calibration)

    @property
    def model_facts(self) -> list[str]:
        """What a reader must know about the model, in words."""
        return [*self.identity.facts, f"positions: {self.positions.text}"]

    @property
    def facts(self) -> list[str]:
        """What was measured, in words, without the model."""
        spec = self.spec
        prompts = f"{spec.prompts} prompts of {spec.length} tokens"
        edits = [f"{each.edit} ({each.words})" for each in self.touched] or spec.edit_texts
        return [prompts, spec.inputs, f"seed {spec.seed}", self.inputs.first_token, *edits]

    @property
    def caption(self) -> str:
        """What stands below a figure of these numbers, so that others can make them again."""
        made = f"posleak {self.versions['posleak']}, definitions {self.definitions_version}"
        return "; ".join([self.identity.short(), *self.facts, f"origin of {self.spec.origin} tokens", made])

    def ended(self, files: dict[str, str], notes: list[str]) -> Record:
        """The record of the finished run."""
        return replace(self, finished=now(), files=files, warnings=(*self.warnings, *notes))

    def as_dict(self) -> dict[str, Any]:
        return {"status": "running" if self.finished is None else "finished", **vars(self)}

    def write(self, folder: Path) -> None:
        RUN.write(folder / RECORD_FILE, self)


RUN = Sealed("posleak run", FORMAT_VERSION, Record, "measure again with --fresh")
"""run.json"""


def digest(
    spec: MeasureSpec, identity: Identity, inputs: InputFacts, computed_with: dict[str, str], once: str = ""
) -> str:
    """Hash of what was asked, of which model, on which tokens, with which software; `once` makes it like no other.

    A text that was changed under the same name has another hash in `inputs`.
    """
    subject = {name: getattr(identity, name) for name in SUBJECT}
    bits = {name: computed_with[name] for name in COMPUTED_WITH}
    return measurement_hash(spec.identifying, subject, inputs, bits, salt=once)


def read_record(folder: Path) -> Record:
    """The record of a run folder, checked field by field."""
    path = folder / RECORD_FILE
    if path.is_dir():
        raise foreign_file_error(path)
    if not path.is_file():
        raise RunError(
            "this is no run folder: it has no run.json",
            where=str(folder),
            remedy="give a folder that `measure`, `trace` or `claims` wrote",
        )
    version = RUN.fields(path).get("definitions_version", DEFINITIONS_VERSION)
    if version != DEFINITIONS_VERSION:
        raise RunError(
            f"its numbers follow version {version} of the definitions, this posleak follows "
            f"{DEFINITIONS_VERSION}: they cannot stand side by side", where=str(path),
            remedy="measure again with --fresh, or read it with the posleak that wrote it",
        )  # fmt: skip
    return RUN.read(path)


def clear_run(folder: Path) -> None:
    """Remove a run, if there is one, and no file that is not its own. Killed in between, it leaves a run that can be
    started again."""
    path = folder / RECORD_FILE
    if not path.exists():
        require_unused(folder)
        return
    if not is_posleak_file(path):
        raise foreign_file_error(path)
    with contextlib.suppress(RunError):  # a record that cannot be read is removed as it is
        RUN.write(path, replace(read_record(folder), finished=None, files={}))
    remove_run(folder)


def is_finished(folder: Path) -> bool:
    """Does the folder hold a finished run?"""
    return (folder / RECORD_FILE).is_file() and read_record(folder).finished is not None


def require_same(folder: Path, earlier: Record, spec: MeasureSpec, identity: Identity, inputs: InputFacts) -> None:
    """Refuse a folder that holds another measurement, saying what differs."""
    unlike = fingerprint_difference(earlier.identity, identity)
    if earlier.digest == digest(spec, identity, inputs, versions()) and not unlike:
        return
    pairs: Iterator[tuple[str, Any, Any]] = (
        (name, there, asked)
        for one, other, names in (
            (plain(earlier.spec), plain(spec), None), (plain(earlier.identity), plain(identity), SUBJECT),
            (plain(earlier.inputs), plain(inputs), None), (earlier.versions, versions(), COMPUTED_WITH),
        )
        for name in names or other
        if (there := one.get(name)) != (asked := other.get(name))
    )  # fmt: skip
    differing = "; ".join([*(f"{name} {there!r} there, {asked!r} asked for" for name, there, asked in pairs), *unlike])
    raise RunError(
        "the folder holds another measurement", where=str(folder),
        got=differing or "another version of the definitions",
        remedy="choose another --out, or --fresh to measure again and overwrite it",
    )  # fmt: skip
