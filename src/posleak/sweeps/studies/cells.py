"""Named studies that compare many measurements: a question, and which cells to measure.

Cells of one study share length, prompts and seed, so that cells of one model are paired. `posleak sweep NAME` does the
same cells as a sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from posleak.errors import InputError, did_you_mean
from posleak.sweeps.cells import Cell

BEYOND_WINDOW = 768
"""Longer than the 512 tokens that Gemma's sliding layers see."""

SMOLLM, GEMMA, QWEN = "smollm2-135m", "gemma3-270m", "qwen2.5-coder-1.5b"


@dataclass(frozen=True)
class Study:
    """`question` in words; the first cell is the one that others of its model are compared with."""

    name: str
    question: str
    cells: tuple[Cell, ...]

    def at(self, *, models: Sequence[str] = (), **changes: Any) -> Study:
        """The same study of other models, or at another length, number of prompts or seed."""
        known = dict.fromkeys(cell.model for cell in self.cells)
        if len(models) > len(known):
            raise InputError(
                "the study has fewer models than were given", where=f"study {self.name}", got=", ".join(models),
                expected=f"at most {len(known)}, in the places of {', '.join(known)}",
            )  # fmt: skip
        names = dict(zip(known, models or known))
        cells = [replace(cell, model=names[cell.model], **changes) for cell in self.cells if cell.model in names]
        return replace(self, cells=tuple(cells))


def _knobs(model: str, edits: Sequence[str]) -> tuple[Cell, ...]:
    return (Cell(model), *(Cell(model, (edit,)) for edit in edits))


NTK = tuple(f"rope=ntk:{factor}" for factor in (2, 4, 8))
SCALED = ("rope=linear:2", "rope=linear:4", "rope=yarn:4")
WINDOWS = tuple(f"window={size}{sink}" for size in (64, 128, 256) for sink in ("", "+sink"))

STUDIES = {
    study.name: study
    for study in (
        Study(
            "architectures",
            "The balance of mask, drift and sink in three architectures, and how the residual changes with depth",
            tuple(Cell(model, length=BEYOND_WINDOW) for model in (SMOLLM, GEMMA, QWEN)),
        ),
        Study(
            "knobs",
            "The same weights with only the rotation or the window changed",
            (
                *_knobs(SMOLLM, (*NTK, *SCALED, *WINDOWS)),
                *(Cell(GEMMA, edits, length=BEYOND_WINDOW) for edits in ((), ("window=off",))),
            ),
        ),
        Study(
            "lengths",
            "How each component grows with the length of the prompt",
            tuple(Cell(SMOLLM, length=length, prompts=8) for length in (256, 512, 1024, 2048, 4096)),
        ),
        Study(
            "first-token",
            "Natural text with a BOS token at position 0, and without one",
            tuple(Cell(m, inputs="text:stdlib", bos=bos) for m in (SMOLLM, GEMMA) for bos in ("auto", "none")),
        ),
        Study(
            "dtypes",
            "Rounding as a source of leakage: the same prompts in float32, bfloat16 and float16",
            _knobs(SMOLLM, ("dtype=bfloat16", "dtype=float16")),
        ),
    )
}


def study_named(name: str) -> Study:
    """One of the studies that posleak knows."""
    if name not in STUDIES:
        raise InputError("no study of this name", got=name, remedy=did_you_mean(name, STUDIES))
    return STUDIES[name]
