"""`dtype=NAME`: the model's parameters rounded to another dtype during the run: rounding as a source of leakage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from posleak.errors import UnsupportedError

from .base import EditKind, NamedEdit, Site, register

if TYPE_CHECKING:
    import torch

    from posleak.probe import Placement, Probe

DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Precision(NamedEdit):
    """Parameters are replaced by rounded ones, and restored afterwards. Buffers, such as rotary frequencies, stay."""

    name: str

    site: ClassVar[Site] = Site.DTYPE
    placing: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return f"dtype={self.name}"

    @property
    def weights_dtype(self) -> torch.dtype:
        import torch

        found: torch.dtype = getattr(torch, self.name)
        return found

    def placed(self, without: Sequence[Placement], within: Sequence[Placement]) -> list[int]:
        """It changes numbers and no positions."""
        return []

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        dtype, kept = self.weights_dtype, {}
        if any(parameter.is_meta for parameter in probe.model.parameters()):
            raise UnsupportedError(
                "offloaded weights cannot be converted: they are read again for every pass", where=self.text,
                remedy=f"load the model in {self.name} instead (--dtype)",
            )  # fmt: skip
        try:
            for parameter in probe.model.parameters():
                if parameter.is_floating_point() and parameter.dtype != dtype:
                    probe.effect_of(self).note("parameters")
                    kept[parameter] = parameter.data
                    parameter.data = parameter.data.to(dtype)
            yield
        finally:
            for parameter, data in kept.items():
                parameter.data = data


register(
    EditKind(
        "dtype", "dtype=" + "|".join(DTYPES),
        "the parameters, converted to this dtype for the time of the run, which holds a second copy of them. Buffers "
        "such as rotary frequencies stay as they are", "a second dtype", "dtype=bfloat16",
        lambda value, scope: {name: Precision(name) for name in DTYPES}[value],
    )
)  # fmt: skip
