"""Faults in other people's files and models: each is refused by name, or measured rightly, and never a traceback."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import posleak as pl
from families import tiny as family
from models_tiny import edit_config, save, tiny
from posleak.doctor import Diagnosis
from posleak.errors import InputError, ModelError, UnsupportedError
from posleak.models import Subject, load
from posleak.origin.cosines import mean_cosine
from posleak.origin.trajectory import Scale, Trajectory
from posleak.show.terminal import spark

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


# -- small vocabularies ----------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {"length": 48, "prompts": 4}
COMMANDS: dict[str, Callable[[Subject, Path], object]] = {
    "measure": lambda subject, out: pl.measure(subject, **SMALL),
    "constant": lambda subject, out: pl.measure(subject, "constant", **SMALL),
    "backcopy": lambda subject, out: pl.measure(subject, "backcopy", **SMALL),
    "trace": lambda subject, out: pl.trace(subject, **SMALL),
    "origin": lambda subject, out: pl.origin(subject, **SMALL, tokens=16),
    "origin without BOS": lambda subject, out: pl.origin(subject, **SMALL, tokens=16, bos="none"),
    "doctor": lambda subject, out: pl.doctor(subject, **SMALL),
    "claims": lambda subject, out: pl.claims(subject, **SMALL, out=out),
    "advise": lambda subject, out: pl.advise(subject, "random", **SMALL, out=out),
}


def vocabulary(size: int, bos: int | None = None, eos: int | None = None, pad: int | None = None) -> Subject:
    return Subject.of(tiny(vocab_size=size, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_vocabulary_without_three_tokens_is_refused(tmp_path: Path, command: str, size: int) -> None:
    with pytest.raises(InputError, match=f"vocab_size = {size}") as refused:
        COMMANDS[command](vocabulary(size), tmp_path / "out")
    assert refused.value.remedy


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("constant", "backcopy")])
def test_random_prompts_need_two_ordinary_tokens(tmp_path: Path, command: str) -> None:
    with pytest.raises(InputError, match="2 or more") as refused:
        COMMANDS[command](vocabulary(4, 1, 2, 0), tmp_path / "out")
    assert "--inputs constant" in str(refused.value.remedy)


@pytest.mark.filterwarnings("ignore::posleak.errors.PosleakWarning")
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "backcopy"])
@pytest.mark.parametrize("size", [3, 4])
def test_three_tokens_are_enough(tmp_path: Path, command: str, size: int) -> None:
    COMMANDS[command](vocabulary(size, bos=1), tmp_path / "out")


# -- weights of zero -------------------------------------------------------------------------------------------------


def zeroed(kind: str, *parts: str) -> Subject:
    """A model whose parameters with these parts of names are zero."""
    model = family(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in parts):
                parameter.zero_()
    return Subject.of(model)


def test_origin_names_the_depths_where_the_state_is_zero() -> None:
    with pytest.raises(UnsupportedError, match="x_0 = 0 at depth 0, 1, 2") as refused:
        pl.origin(zeroed("bloom", "layernorm", "ln_f"), **SMALL, tokens=16)
    assert "norms" in str(refused.value.remedy)


@pytest.mark.parametrize(("kind", "parts"), [("bloom", ("layernorm", "ln_f")), ("llama", ("norm",)), ("llama", ("",))])
@pytest.mark.parametrize("command", ["measure", "trace", "doctor", "claims"])
def test_models_of_zeros_are_measured(tmp_path: Path, command: str, kind: str, parts: tuple[str, ...]) -> None:
    found = COMMANDS[command](zeroed(kind, *parts), tmp_path / "out")
    if isinstance(found, Diagnosis):
        assert not [check.id for check in found.checks if not check.ok]


def test_a_projection_is_not_mistaken_for_a_module_that_takes_more() -> None:
    """Attention that writes zero looks like the input of whatever else is given zeros."""
    assert "output" not in pl.origin(zeroed("bloom", "attention"), **SMALL, tokens=16).reading.spaces


def test_what_a_zero_state_leaves_undefined_is_said() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]])
    nothing = np.zeros(3)
    path = Trajectory.of(x, Scale(nothing, nothing, nothing, 1), 1, None)
    assert np.isnan(path.relative).all() and path.jump == 2
    assert np.isnan(mean_cosine(x)) and mean_cosine(x[1:]) == pytest.approx(1)
    assert spark([-np.inf, 0.0, 1.0]) == "·▁█" and spark([np.nan]) == "·"
