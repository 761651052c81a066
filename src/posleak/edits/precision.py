"""`dtype=NAME`: the model's parameters rounded to another dtype for the time of the run, as a numerical source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

from posleak.probe import Probe

from .base import NamedEdit, Site

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Precision(NamedEdit):
    """Parameters swapped for rounded ones, and put back to the bit. Buffers stay: rotary frequencies are no weights."""

    name: str

    site: ClassVar[Site] = Site.DTYPE

    @property
    def text(self) -> str:
        return f"dtype={self.name}"

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        dtype, kept = DTYPES[self.name], {}
        try:
            for parameter in probe.model.parameters():
                if parameter.is_floating_point() and parameter.dtype != dtype:
                    kept[parameter] = parameter.data
                    parameter.data = parameter.data.to(dtype)
            yield
        finally:
            for parameter, data in kept.items():
                parameter.data = data
