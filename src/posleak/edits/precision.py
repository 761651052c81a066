"""`dtype=NAME`: convert the model's parameters to another dtype for the run, to measure leakage by rounding."""

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
    """Edit that converts all parameters during the run. Buffers, such as rotary frequencies, are not converted."""

    name: str

    site: ClassVar[Site] = Site.DTYPE
    placing: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return f"dtype={self.name}"

    @property
    def weights_dtype(self) -> torch.dtype:  # type: ignore[override]
        import torch

        dtype: torch.dtype = getattr(torch, self.name)
        return dtype

    def placed(self, without: Sequence[Placement], within: Sequence[Placement]) -> list[int]:
        """Return no calls: a conversion does not change positions."""
        return []

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        dtype, originals = self.weights_dtype, {}
        if any(parameter.is_meta for parameter in probe.model.parameters()):
            raise UnsupportedError(
                "offloaded weights cannot be converted: they are loaded again for every pass", where=self.text,
                remedy=f"load the model in {self.name} instead (--dtype)",
            )  # fmt: skip
        try:
            for parameter in probe.model.parameters():
                if parameter.is_floating_point() and parameter.dtype != dtype:
                    probe.effect_of(self).note("parameters")
                    originals[parameter] = parameter.data
                    parameter.data = parameter.data.to(dtype)
            yield
        finally:
            for parameter, data in originals.items():
                parameter.data = data


register(
    EditKind(
        "dtype", "dtype=" + "|".join(DTYPES),
        "the parameters, which are converted to this dtype during the run; this needs memory for a second "
        "copy. Buffers such as rotary frequencies are not converted", "a second dtype", "dtype=bfloat16",
        lambda value, scope: {name: Precision(name) for name in DTYPES}[value],
    )
)  # fmt: skip
