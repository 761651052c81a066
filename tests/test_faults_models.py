"""Faults in other people's files and models: each is refused by name, or measured rightly, and never a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models_tiny import edit_config, save, tiny
from posleak.errors import ModelError
from posleak.models import Subject, load

# -- windows ---------------------------------------------------------------------------------------------------------

WINDOWS = [
    ("Mistral", {}, "sliding_window", -3),
    ("Mistral", {}, "sliding_window", 0),
    ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8}, "sliding_window", -1),
]


@pytest.mark.parametrize(("kind", "sizes", "key", "value"), WINDOWS)
def test_a_window_without_keys_is_refused_by_name(
    tmp_path: Path, kind: str, sizes: dict[str, Any], key: str, value: int
) -> None:
    model = tiny(kind, **sizes)
    folder = save(model, tmp_path / "model")
    edit_config(folder, **{key: value})
    (folder / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(ModelError, match=f"{key} = {value}") as refused:
        load(folder)
    assert "config.json" in str(refused.value.where)
    setattr(model.config, key, value)
    with pytest.raises(ModelError, match=f"{key} = {value}"):
        Subject.of(model)


def test_a_window_that_no_layer_uses_may_be_anything() -> None:
    model = tiny("Qwen2", use_sliding_window=False)
    model.config.sliding_window = -1
    assert Subject.of(model).identity.spans == []
