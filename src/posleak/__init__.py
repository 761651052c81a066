"""posleak: where does a decoder-only language model's sense of absolute position come from?

    import posleak as pl
    subject = pl.load("smollm2-135m")
    run = pl.measure(subject, length=512, prompts=16, seed=0)
    parts = pl.split(run)
    sources = pl.trace(subject)
    pl.report([run], "report.html")

Names are imported when they are first used: torch is slow to load, and not every use needs it.
"""

from __future__ import annotations

from importlib import import_module
from inspect import isfunction
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .callable import checked

if TYPE_CHECKING:
    from .advice import advise
    from .claims.examination import claims
    from .doctor.doctor import doctor
    from .models import Subject, load
    from .origin.origin import origin
    from .report.collected import collect
    from .report.compare import compare
    from .report.page import report
    from .runs import Run, measure, split
    from .studies import study
    from .sweep.sweep import sweep
    from .trace.trace import trace

_HOMES = {
    "Subject": ".models",
    "advise": ".advice",
    "load": ".models",
    "Run": ".runs",
    "measure": ".runs.measure",
    "split": ".runs",
    "trace": ".trace",
    "origin": ".origin",
    "claims": ".claims",
    "doctor": ".doctor",
    "study": ".studies",
    "report": ".report",
    "compare": ".report",
    "sweep": ".sweep",
    "collect": ".report.collected",
}

__all__ = [
    "Run",
    "Subject",
    "__version__",
    "advise",
    "claims",
    "collect",
    "compare",
    "doctor",
    "load",
    "measure",
    "origin",
    "report",
    "split",
    "study",
    "sweep",
    "trace",
]


def __getattr__(name: str) -> Any:
    """A public name, from its home. Functions check how they are called, and so do packages that can be called."""
    if name not in _HOMES:
        raise AttributeError(f"module 'posleak' has no attribute {name!r}")
    home = import_module(_HOMES[name], __name__)
    if _HOMES[name] == f".{name}":
        return home
    found = getattr(home, name)
    return checked(found) if isfunction(found) else found


def __dir__() -> list[str]:
    return sorted(__all__)
