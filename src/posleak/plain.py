"""Results as JSON: numbers, lists and objects; null for what is not a number, which JSON does not have."""

from __future__ import annotations

import math
from typing import Any


def plain(value: Any) -> Any:
    """A JSON-ready copy. Whatever has `as_dict` is asked for it."""
    if hasattr(value, "as_dict"):
        return plain(value.as_dict())
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # arrays and scalars of numpy, which is not imported to ask
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
