"""Stage 12, many measurements compared: across architectures, rotations and windows, lengths, first tokens, dtypes.

cells     named studies: a question, and the cells (measurements) that answer it
run       measures cell by cell, into run folders that are kept and reused
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from posleak.lazy import lazy

if TYPE_CHECKING:
    from posleak.sweep.cells import Cell

    from .cells import STUDIES, Study, study_named
    from .run import Row, Table, run_study, study

__getattr__ = lazy(
    __name__, {"cells": ("STUDIES", "Cell", "Study", "study_named"), "run": ("Row", "Table", "run_study", "study")}
)

__all__ = ["STUDIES", "Cell", "Row", "Study", "Table", "run_study", "study", "study_named"]
