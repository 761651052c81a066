"""Stage 9, what is shown: tables, figures, one self-contained page.

sources     run folders as they are found: whole, partial, or refused with the reason
curves      every head's curves with intervals
view        a run as the page shows it
figures     plotly figures
page        the page: templates, style, script and numbers in one file
compare     runs side by side, with differences and intervals; formats: as a terminal table, Markdown, LaTeX
assets      figures for print, and every table as CSV and Parquet

`posleak.report` is this package and can be called: `posleak.report(runs, "report.html")`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from .compare import Comparison, compare
from .page import Page, report

__all__ = ["Comparison", "Page", "compare", "report"]


class _Callable(ModuleType):
    """The package's name is also that of its one function: importing it must not hide the other."""

    def __call__(self, *args: Any, **more: Any) -> Path:
        return report(*args, **more)


sys.modules[__name__].__class__ = _Callable
