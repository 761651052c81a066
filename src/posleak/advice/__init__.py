"""Stage 13, advice for engineers: which setting lowers which part of the leakage without training, and what it costs.

settings  the settings that are tried on a model: first token, windows, rotations, logits, dtype
effects   measures each beside the model as it is, on the same text, and says what follows from the intervals

`posleak.advise` is `posleak.advice.advise`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from posleak.lazy import lazy

if TYPE_CHECKING:
    from .effects import Advice, Effect, advise
    from .settings import Setting, settings_for

__getattr__ = lazy(
    __name__, {"effects": ("Advice", "Effect", "advise"), "settings": ("Setting", "settings_for")}
)  # fmt: skip

__all__ = ["Advice", "Effect", "Setting", "advise", "settings_for"]
