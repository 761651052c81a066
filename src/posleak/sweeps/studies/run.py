"""A study, cell by cell, into run folders that are kept and reused; and its table, which is the result."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from posleak.errors import InputError, NoEffectError, TooLargeError
from posleak.files import write_json
from posleak.leakage import Estimate
from posleak.leakage.contrast import contrasts, model_products
from posleak.models import AnyModel, Subject, load, subject_of
from posleak.runs.balance import Balance
from posleak.runs.prepared import PreparedRun
from posleak.runs.progress import OnProgress
from posleak.runs.run import Run
from posleak.runs.spec import parse_bytes
from posleak.signatures import checked
from posleak.sweeps.cells import Cell
from posleak.text import visible

from .cells import Study, study_named

TABLE = "study.json"
ASKED = ("model", "edits", "length", "prompts", "seed", "inputs", "bos", "dtype")
"""Fields of a cell that studies have."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One measured cell: its balance, and 1 − power / power in the first cell of its model, for each component."""

    cell: Cell
    run: Run
    balance: Balance
    removed: dict[str, Estimate]

    def as_dict(self) -> dict[str, Any]:
        identity = self.run.record.identity
        return {
            "label": self.cell.label, "cell": {name: getattr(self.cell, name) for name in ASKED},
            "run": str(self.run.path), "dtype": identity.dtype,
            "quantisation": identity.quantisation, "balance": self.balance, "removed": self.removed,
        }  # fmt: skip


@dataclass(frozen=True, repr=False)
class Table:
    """study.json: the question and every row; runs are named, not copied.

    left_out   cells, by label, whose edits would change nothing in their model or at their length, and why
    """

    study: str
    question: str
    rows: list[Row]
    left_out: dict[str, str]

    def __repr__(self) -> str:
        cells = ", ".join(row.cell.label for row in self.rows)
        return f"Table({self.study}: {visible(cells)})"


@checked
def study(
    study: str | Study = "architectures",
    *,
    models: AnyModel | Iterable[AnyModel] = (),
    length: int | None = None,
    prompts: int | None = None,
    seed: int | None = None,
    out: str | Path = "runs",
    max_memory: str | int | None = None,
    progress: Say | None = None,
) -> Table:
    """Compare many measurements: the balance of mask, drift and sink across architectures, lengths or settings.

    study       its name (architectures, knobs, lengths, first-token, dtypes), or a Study of your own cells
    models      instead of the study's, in its order: subjects, models of transformers, or what `load` takes
    length      tokens per prompt, instead of the study's own
    prompts     how many, instead of the study's own
    seed        of the tokens, instead of the study's own
    out         a folder for the runs, which are kept and reused, and for the table
    max_memory  what the process may hold, as in `measure`
    progress    called with what is done now, in words
    """
    chosen = study_named(study) if isinstance(study, str) else study
    if not isinstance(chosen, Study):
        raise InputError(
            "this is no study", where="study", got=f"{study!r:.80}", expected="the name of a study, or a Study",
            remedy='a model goes into models: study("architectures", models=[model])',
        )  # fmt: skip
    single = isinstance(models, str | os.PathLike) or not isinstance(models, Iterable)
    names, subjects = _named([models] if single else list(models))  # type: ignore[list-item, arg-type]
    asked = {"length": length, "prompts": prompts, "seed": seed}
    chosen = chosen.at(models=names, **{name: value for name, value in asked.items() if value is not None})
    for cell in chosen.cells:
        with suppress(NoEffectError):  # such a cell is left out, and the table says so
            _ = cell.spec  # refuses what cannot be measured before a model is loaded
    return run_study(chosen, out, progress or (lambda what: None), max_memory=max_memory, subjects=subjects)


def _named(models: list[AnyModel]) -> tuple[list[str], dict[str, Subject]]:
    """The models' names, and those that are in memory already, by name."""
    names, subjects = list[str](), dict[str, Subject]()
    for model in models:
        if isinstance(model, str | os.PathLike):
            names.append(os.fsdecode(model))
            continue
        subject = subject_of(model)
        names.append(subject.identity.name)
        subjects[subject.identity.name] = subject
    if len(set(names)) < len(names):
        raise InputError(
            "models of one study need names of their own", where="models", got=", ".join(names),
            remedy='name those in memory: Subject.of(model, tokenizer, name="mine")',
        )  # fmt: skip
    return names, subjects


def run_study(
    chosen: Study,
    root: str | Path = "runs",
    progress: Say = lambda what: None,
    *,
    max_memory: str | int | None = None,
    subjects: Mapping[str, Subject] | None = None,
) -> Table:
    """Measure what is missing, one model loaded at a time, and read the table off the runs.

    `max_memory` is what the process may hold, as in `measure`: what does not fit is refused before it is measured.
    `subjects`: models that are in memory already, by the name that cells have for them.
    """
    limit, known = parse_bytes(max_memory), subjects or {}
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for (model, _), cells in groupby(chosen.cells, key=lambda cell: (cell.model, cell.dtype)):
        rows += _rows(list(_measured(list(cells), Path(root), progress, limit, known.get(model), left_out)))
    table = Table(chosen.name, chosen.question, rows, left_out)
    write_json(Path(root) / f"study-{chosen.name}" / TABLE, table)
    return table


def _measured(
    cells: list[Cell], root: Path, progress: Say, limit: int | None, subject: Subject | None, left_out: dict[str, str]
) -> Iterator[tuple[Cell, Run]]:
    """The cells of one model; those whose edits would change nothing go to `left_out`."""
    if subject is None:
        progress(f"loading {cells[0].model}")
        subject = _load(cells[0], progress)
    else:
        _require_dtype(cells[0], subject)
    for cell in cells:
        try:
            ready = PreparedRun.of(subject, cell.spec, max_memory=limit)
            run = ready.run_with_warnings(root / ready.folder_name, on_progress=_said(cell, progress))
        except NoEffectError as error:
            left_out[cell.label] = error.what
        else:
            yield cell, run


def _said(cell: Cell, progress: Say) -> OnProgress:
    return lambda reached: progress(f"{cell.label}: {reached.text}")


def _require_dtype(cell: Cell, subject: Subject) -> None:
    if cell.dtype not in (None, subject.identity.dtype):
        raise InputError(
            "the study asks for another dtype than the model has in memory", where=subject.identity.name,
            got=subject.identity.dtype, expected=cell.dtype, remedy="give the model by name, or in that dtype",
        )  # fmt: skip


def _load(cell: Cell, progress: Say) -> Subject:
    """In float32; where that does not fit, in bfloat16, and the result says so."""
    try:
        return load(cell.model, dtype=cell.dtype, progress=progress)
    except TooLargeError:
        if cell.dtype is not None:
            raise
        progress(f"{cell.model} does not fit in float32: loading it in bfloat16")
        return load(cell.model, dtype="bfloat16", progress=progress)


def _rows(measured: list[tuple[Cell, Run]]) -> Iterator[Row]:
    if not measured:
        return
    first = measured[0][1]
    before = model_products(first.products)
    for cell, run in measured:
        paired = run.prompts == first.prompts and run.record.inputs.same_tokens(first.record.inputs)
        compared = paired and run is not first
        found = contrasts(model_products(run.products), before, cell.prompts) if compared else {}
        removed = {f"{component}, {queries}": each.removed for (queries, component), each in found.items()}
        yield Row(cell, run, Balance.of(run), removed)
