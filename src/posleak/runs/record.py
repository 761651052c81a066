"""run.json as dataclasses: the request, the model, the prompts, the software, and how the run ended.

Only this module writes and reads run.json. All other code uses the fields of `Record`.
"""

from __future__ import annotations

import contextlib
import platform
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from posleak.errors import RunError
from posleak.files import Sealed, foreign_file_error, is_posleak_file
from posleak.inputs import InputFacts
from posleak.models import Identity, Subject
from posleak.models.offload import is_offloaded
from posleak.probe import Calibration, EditEffect, Motion, Plan, Positions
from posleak.probe.fingerprint import fingerprint_difference
from posleak.typed import plain

from .folder import RECORD_FILE, remove_run, require_unused
from .memory import MemoryPlan
from .software import COMPUTED_WITH, DEFINITIONS_VERSION, measurement_hash, versions
from .spec import MeasureSpec

FORMAT_VERSION = 5

IDENTITY_FIELDS = (
    "weights_sha256", "config_sha256", "tokenizer_sha256", "code_sha256", "architecture", "dtype", "device", "adapters",
    "hooks",
)  # fmt: skip
"""Fields of a model's identity that determine results. The fingerprint is compared separately, up to rounding."""


@dataclass(frozen=True)
class Machine:
    """The machine on which a run was measured.

    offloaded   weights stayed on disk or in another memory than that of the device;  processes: number that shared work
    """

    platform: str
    python: str
    device: str
    threads: int
    offloaded: bool = False
    processes: int = 1

    @classmethod
    def of(cls, subject: Subject) -> Machine:
        return cls(
            platform.platform(), platform.python_version(), str(subject.device), torch.get_num_threads(),
            is_offloaded(subject.model), subject.ranks.size,
        )  # fmt: skip


@dataclass(frozen=True)
class Record:
    """The record of one run.

    digest      hash of everything that determines the results: runs with the same digest have the same results
    asked       the spec as requested;  spec: with every default filled in
    touched     what each edit changed in the first batch
    finished    time of the end; None while it runs
    files       sha256 of the other files of the run, by name
    changed     how the model differed after the run; None if it did not
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
        """Return how the model encodes positions in this run."""
        return Positions.of(self.motion, self.calibration)

    @property
    def model_facts(self) -> list[str]:
        """Return descriptions of the model, for tables and figures."""
        return [*self.identity.facts, f"positions: {self.positions.text}"]

    @property
    def facts(self) -> list[str]:
        """Return descriptions of the prompts and edits, for tables and figures."""
        spec = self.spec
        prompts = f"{spec.prompts} prompts of {spec.length} tokens"
        edits = [f"{effect.edit} ({effect.words})" for effect in self.touched] or spec.edit_texts
        return [prompts, spec.inputs, f"seed {spec.seed}", self.inputs.first_token, *edits]

    @property
    def caption(self) -> str:
        """Return the caption of a figure, with what is needed to reproduce it."""
        software = f"posleak {self.versions['posleak']}, definitions {self.definitions_version}"
        return "; ".join([self.identity.short(), *self.facts, f"origin of {self.spec.origin} tokens", software])

    def as_dict(self) -> dict[str, Any]:
        return {"status": "running" if self.finished is None else "finished", **vars(self)}

    def write(self, folder: Path) -> None:
        RUN.write(folder / RECORD_FILE, self)


RUN = Sealed("posleak run", FORMAT_VERSION, Record, "measure again with --fresh")
"""run.json"""


def digest(
    spec: MeasureSpec, identity: Identity, inputs: InputFacts, computed_with: dict[str, str], salt: str = ""
) -> str:
    """Return the hash of a measurement: its spec, model, prompts and software; `salt` makes it unique.

    `inputs` has the hash of a text, so that a changed text of the same name gives another digest.
    """
    subject = {name: getattr(identity, name) for name in IDENTITY_FIELDS}
    software = {name: computed_with[name] for name in COMPUTED_WITH}
    return measurement_hash(spec.identifying, subject, inputs, software, salt=salt)


def read_record(folder: Path) -> Record:
    """Return the record of a run folder after checking every field."""
    path = folder / RECORD_FILE
    if path.is_dir():
        raise foreign_file_error(path)
    if not path.is_file():
        raise RunError(
            "not a run folder: it has no run.json", where=str(folder),
            remedy="pass a folder written by `measure`, `trace` or `claims`",
        )  # fmt: skip
    version = RUN.fields(path).get("definitions_version", DEFINITIONS_VERSION)
    if version != DEFINITIONS_VERSION:
        raise RunError(
            f"the run uses version {version} of the definitions, and this posleak uses version {DEFINITIONS_VERSION}: "
            "the results are not comparable", where=str(path),
            remedy="measure again with --fresh, or read it with the version of posleak that wrote it",
        )  # fmt: skip
    return RUN.read(path)


def clear_run(folder: Path) -> None:
    """Remove the files of the folder's run, if it has one; a process killed in between leaves a run that can be
    resumed."""
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
    """Return whether the folder holds a finished run."""
    return (folder / RECORD_FILE).is_file() and read_record(folder).finished is not None


def require_same(folder: Path, earlier: Record, spec: MeasureSpec, identity: Identity, inputs: InputFacts) -> None:
    """Raise a RunError that names the differences if the folder holds another measurement."""
    fingerprints, differences = fingerprint_difference(earlier.identity, identity), list[str]()
    if earlier.digest == digest(spec, identity, inputs, versions()) and not fingerprints:
        return
    for stored, requested, names in (
        (plain(earlier.spec), plain(spec), None), (plain(earlier.identity), plain(identity), IDENTITY_FIELDS),
        (plain(earlier.inputs), plain(inputs), None), (earlier.versions, versions(), COMPUTED_WITH),
    ):  # fmt: skip
        for name in names or requested:
            if stored.get(name) != requested.get(name):
                differences.append(f"{name} {stored.get(name)!r} there, {requested.get(name)!r} requested")
    raise RunError(
        "the folder holds another measurement", where=str(folder),
        got="; ".join([*differences, *fingerprints]) or "another version of the definitions",
        remedy="choose another --out, or --fresh to measure again and overwrite it",
    )  # fmt: skip
