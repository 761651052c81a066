"""The type of arrays that go through JSON: float64, as nested lists, with null for NaN."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray


class _FromLists:
    """Reads a number or nested lists of numbers as a float64 array; null is NaN."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(_array)


def _array(value: Any) -> NDArray[np.float64]:
    try:
        return np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError("expected a number, or lists of numbers of equal length") from error


Array = Annotated[NDArray[np.float64], _FromLists]
