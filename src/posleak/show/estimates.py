"""What can be shown: values with intervals, and decompositions. Their classes are in leakage and metrics, which come
later."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol


class HasEnds(Protocol):
    """An interval."""

    @property
    def low(self) -> Any: ...
    @property
    def high(self) -> Any: ...


class HasInterval(HasEnds, Protocol):
    """A value with its interval, from n prompts: of one cell or of several."""

    @property
    def value(self) -> Any: ...
    @property
    def n(self) -> int: ...
    def __rsub__(self, constant: int) -> HasInterval: ...


class HasShares(Protocol):
    """A decomposition: powers, and shares of the total."""

    @property
    def power(self) -> Mapping[str, HasInterval]: ...
    @property
    def share(self) -> Mapping[str, HasInterval]: ...
    @property
    def stabilisation(self) -> HasInterval: ...
    @property
    def even(self) -> HasShares | None: ...
    def disagreement(self, names: Collection[str]) -> bool: ...
