"""Edit objects without a text: `measure(subject, edits=[MyEdit()])`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from posleak.inputs import Prompts
from posleak.probe.edit import Edit
from posleak.text import visible

from .base import NamedEdit, Site

if TYPE_CHECKING:
    import torch
    from jaxtyping import Int
    from torch import Tensor

    from posleak.probe import Call, Probe


@dataclass(frozen=True, eq=False)
class UnnamedEdit(NamedEdit):
    """An `Edit` that has no text. It is shown by its repr and acts after all edits that have a text.

    No two are equal: a text does not determine what such an edit does.
    """

    inner: Edit

    site: ClassVar[Site] = Site.OWN

    @property
    def text(self) -> str:
        """Return the repr of the edit, or the name of its class if the class defines no repr."""
        if type(self.inner).__repr__ is object.__repr__:
            return type(self.inner).__name__
        return visible(" ".join(repr(self.inner).split()))[:80]

    @property
    def placing(self) -> bool:  # type: ignore[override]
        return self.inner.placing

    @property
    def causal(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.inner, "causal", True))

    @property
    def needs_causal(self) -> bool:  # type: ignore[override]
        return bool(getattr(self.inner, "needs_causal", False))

    @property
    def weights_dtype(self) -> torch.dtype | None:
        dtype: torch.dtype | None = getattr(self.inner, "weights_dtype", None)
        return dtype

    def prompts(self, prompts: Prompts) -> Prompts:
        return self.inner.prompts(prompts)

    def reads(self, ids: Int[Tensor, "B T"]) -> None:
        self.inner.reads(ids)

    def positions(self, positions: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        return self.inner.positions(positions)

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        if type(self.inner).installed is not Edit.installed:
            probe.effect_of(self).note("what it installs")
        with self.inner.installed(probe):
            yield

    def edit(self, call: Call) -> Call:
        return self.inner.edit(call)
