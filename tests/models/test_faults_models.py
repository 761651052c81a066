"""Faults in other people's files and models: each is refused by name, or measured rightly, and never a traceback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import posleak as pl
from posleak.analyses.doctor.doctor import Diagnosis
from posleak.analyses.origin.origin import read_origin
from posleak.analyses.origin.portrait import BodyScale, Trajectory, mean_cosine
from posleak.errors import CheckError, InputError, ModelError, PosleakWarning, UnsupportedError
from posleak.inputs import given
from posleak.inputs.given import read_given
from posleak.models import Subject, hashing, load
from posleak.models.sources import snapshot_folder
from posleak.runs.spec import parse_bytes
from posleak.show.terminal import spark
from posleak.sweeps.manifest import manifest, read_manifest
from support.errors import mentions, raises
from support.families import tiny
from support.inputs_subject import stub_subject, word_tokenizer
from support.models_tiny import edit_config, save, small_model

# -- windows ---------------------------------------------------------------------------------------------------------

WINDOWS = [
    ("Mistral", {}, "sliding_window", -3),
    ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8}, "sliding_window", -1),
]


@pytest.mark.parametrize(("kind", "sizes", "key", "value"), WINDOWS)
def test_a_window_without_keys_is_refused_by_name(
    tmp_path: Path, kind: str, sizes: dict[str, Any], key: str, value: int
) -> None:
    model = small_model(kind, **sizes)
    folder = save(model, tmp_path / "model")
    edit_config(folder, **{key: value})
    (folder / "model.safetensors").write_bytes(b"never read")
    with raises(ModelError, where="config.json", got=f"{key} = {value}", remedy=key):
        load(folder)
    setattr(model.config, key, value)
    with raises(ModelError, got=f"{key} = {value}", remedy=key):
        Subject.of(model)


def test_a_window_that_no_layer_uses_may_be_anything() -> None:
    model = small_model("Qwen2", use_sliding_window=False)
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
    return Subject.of(small_model(vocab_size=size, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_vocabulary_without_three_tokens_is_refused(tmp_path: Path, command: str, size: int) -> None:
    with raises(InputError, got=f"vocab_size = {size}", expected=3, remedy="vocab_size"):
        COMMANDS[command](vocabulary(size), tmp_path / "out")


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("constant", "backcopy")])
def test_random_prompts_need_two_ordinary_tokens(tmp_path: Path, command: str) -> None:
    with raises(InputError, got=("1", "4"), expected=2, remedy="--inputs constant"):
        COMMANDS[command](vocabulary(4, 1, 2, 0), tmp_path / "out")


@pytest.mark.filterwarnings("ignore::posleak.errors.PosleakWarning")
@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "backcopy"])
def test_three_ordinary_tokens_are_enough(tmp_path: Path, command: str) -> None:
    COMMANDS[command](vocabulary(4, bos=1), tmp_path / "out")


# -- weights of zero -------------------------------------------------------------------------------------------------


def zeroed(kind: str, *parts: str) -> Subject:
    """A model whose parameters with these parts of names are zero."""
    model = tiny(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in parts):
                parameter.zero_()
    return Subject.of(model)


def test_origin_names_the_depths_where_the_state_is_zero() -> None:
    with raises(UnsupportedError, where="position 0", got="x_0 = 0 at depth 0, 1, 2", remedy="norms"):
        pl.origin(zeroed("bloom", "layernorm", "ln_f"), **SMALL, tokens=16)


@pytest.mark.parametrize(("kind", "parts"), [("bloom", ("layernorm", "ln_f")), ("llama", ("norm",)), ("llama", ("",))])
@pytest.mark.parametrize("command", ["measure", "trace", "doctor", "claims"])
def test_models_of_zeros_are_measured(tmp_path: Path, command: str, kind: str, parts: tuple[str, ...]) -> None:
    found = COMMANDS[command](zeroed(kind, *parts), tmp_path / "out")
    if isinstance(found, Diagnosis):
        assert not [check.id for check in found.checks if not check.ok]


def test_a_projection_is_not_mistaken_for_a_module_that_takes_more() -> None:
    """Attention that writes zero looks like the input of whatever else is given zeros."""
    assert "output" not in {
        call.space for call in pl.origin(zeroed("bloom", "attention"), **SMALL, tokens=16).reading.calls
    }


def test_what_a_zero_state_leaves_undefined_is_said() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0], [6.0, 8.0]])
    nothing = np.zeros(3)
    path = Trajectory.of(x, BodyScale(nothing, nothing, nothing, 1), 1, None)
    assert np.isnan(path.relative).all()
    assert path.jump == 2
    assert np.isnan(mean_cosine(x))
    assert mean_cosine(x[1:]) == pytest.approx(1)
    assert spark([-np.inf, 0.0, 1.0]) == "·▁█"
    assert spark([np.nan]) == "·"


# -- names that lead out of a folder ---------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["../../elsewhere", "../refs", "nested/../..", "absolute", ".", "linked", ""])
def test_a_snapshot_is_in_the_hub_cache(tmp_path: Path, target: str) -> None:
    save(small_model(), tmp_path / "elsewhere")
    cache = tmp_path / "models--org--name"
    shutil.copytree(tmp_path / "elsewhere", cache / "snapshots" / "abc")
    shutil.copytree(tmp_path / "elsewhere", cache / "refs" / "nested")
    (cache / "snapshots" / "linked").symlink_to(tmp_path / "elsewhere")
    target = str(tmp_path / "elsewhere") if target == "absolute" else target
    (cache / "refs" / "main").write_text(target + "\n")
    for revision in [None, *([target] if target else [])]:
        for find in (lambda: load(cache, revision=revision), lambda: snapshot_folder(cache, revision)):  # noqa: B023
            with raises(ModelError, where=cache, expected="'abc'"):
                find()
    assert load(cache, revision="abc").identity.revision == "abc"


def test_files_of_a_snapshot_may_be_links_to_blobs(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--name" / "snapshots" / "abc"
    save(small_model(), tmp_path / "models--org--name" / "blobs")
    folder.mkdir(parents=True)
    for blob in (tmp_path / "models--org--name" / "blobs").iterdir():
        (folder / blob.name).symlink_to(Path("../../blobs") / blob.name)
    (folder.parents[1] / "refs" / "pr").mkdir(parents=True)
    (folder.parents[1] / "refs" / "pr" / "1").write_text("abc")
    assert load(folder.parents[1], revision="pr/1").identity.revision == "abc"


@pytest.mark.parametrize("name", ["../../x", "..", ".", "/tmp/x", "a/../../b", "C:x"])
def test_a_manifest_cannot_name_a_place_outside_of_the_results(name: str) -> None:
    with raises(InputError, where="name", got=name):
        manifest({"name": name, "models": ["smollm2-135m"]})


# -- numbers of many digits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["9" * 400_000, "-0x" + "f" * 400_000, "0b" + "1" * 400_000, "1" + ":59" * 50_000])
@pytest.mark.parametrize("key", ["length", "name", "seed", "resources", "2"])
def test_a_number_of_many_digits_is_refused_with_its_place(tmp_path: Path, number: str, key: str) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(f"models: [smollm2-135m]\n{key}: {number}\n" if key != "2" else f"models: [a]\n? {number}\n: 1\n")
    with raises(InputError, where=path, got=("line 2", 40)):
        read_manifest(path)


def test_the_digits_of_a_revision_are_no_step_if_there_are_too_many() -> None:
    cells = manifest({"models": [{"model": "org/name", "revisions": ["step" + "9" * 400_000, "step12"]}]}).cells
    assert [cell.step for cell in cells] == [None, 12]


@pytest.mark.parametrize("amount", ["9" * 400 + "GB", [], True, float("nan")])
def test_an_amount_of_memory_is_a_finite_number(amount: Any) -> None:
    with raises(InputError, where="--max-memory", expected="8GB") as caught:
        parse_bytes(amount)
    assert str(caught.value.got).startswith(repr(amount)[:50])


def test_a_key_that_the_model_does_not_use_may_be_anything() -> None:
    pl.measure(Subject.of(tiny("bloom", intermediate_size="x")), **SMALL)


# -- files that are refused unread -----------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [b"", b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, b"PK\x03\x04"])
def test_a_gguf_file_is_hashed_only_after_its_header_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(start)
    os.truncate(path, 10**10)
    hashed = list[Path]()
    monkeypatch.setattr(hashing, "file_sha256", lambda path, *_: hashed.append(path))
    with raises(ModelError, where=path, what="GGUF"):
        load(path, cache=tmp_path / "cache")
    assert not hashed


def test_python_without_docstrings_is_named(tmp_path: Path) -> None:
    folder = save(small_model(), tmp_path / "model")
    code = f"import posleak as pl\ntry: pl.load({str(folder)!r})\nexcept Exception as error: print(error)"
    said = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONOPTIMIZE": "2"}, capture_output=True, text=True
    )
    assert "PYTHONOPTIMIZE" in said.stdout, said.stderr


def test_a_head_that_the_config_ties_and_the_file_does_not_is_named(tmp_path: Path) -> None:
    folder = save(small_model(tie_word_embeddings=False), tmp_path / "model")
    edit_config(folder, tie_word_embeddings=True)
    with pytest.warns(
        PosleakWarning, match=mentions("lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings")
    ):
        tied = load(folder)
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(tied.model.lm_head.weight, stored["lm_head.weight"])
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    load(folder)  # no warning: both are the same


# -- tokenizers ------------------------------------------------------------------------------------------------------

CHAT = [{"role": "user", "content": "w1 w2"}]
LOOPS = "{% for a in range(3000) %}{% for b in range(3000) %}{% endfor %}{% endfor %}w1 w2"
WRITES = "{% for a in range(1000) %}{{ 'w1 ' * 1000 }}{% endfor %}"


@pytest.mark.parametrize(("template", "limit", "most"), [(LOOPS, "SECONDS", 0.02), (WRITES, "CHARACTERS", 10_000)])
def test_a_chat_template_is_stopped(monkeypatch: pytest.MonkeyPatch, template: str, limit: str, most: float) -> None:
    who = stub_subject(word_tokenizer())
    who.tokenizer.chat_template = template
    monkeypatch.setattr(given, f"TEMPLATE_{limit}", most)
    before = sys.gettrace()
    with raises(InputError, where="inputs", got=f"{most:,}", remedy="chat_template"):
        read_given(who, CHAT)
    assert sys.gettrace() is before


def test_a_debugger_keeps_its_trace_function() -> None:
    who, before = stub_subject(word_tokenizer()), sys.gettrace()
    who.tokenizer.chat_template = "{{ messages[0].content }}"

    def debugger(frame: FrameType, event: str, value: object) -> None:
        return None

    try:
        sys.settrace(debugger)
        table = read_given(who, CHAT).table
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    assert after is debugger
    assert table.tolist() == [who.tokenizer("w1 w2", add_special_tokens=False)["input_ids"]]


def with_nul() -> PreTrainedTokenizerFast:
    """A tokenizer that has NUL in every token but one."""
    words = {"<unk>": 0} | {f"w\0{number}": number for number in range(1, 97)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), unk_token="<unk>")


def test_control_characters_of_tokens_are_spelled_out_in_files(tmp_path: Path) -> None:
    who = Subject.of(small_model(), with_nul())
    run = pl.measure(who, **SMALL, out=tmp_path / "run")
    assert run.record.inputs.bos_token == r"w\x001"
    for _ in range(2):  # as well as on the next start
        pl.claims(who, **SMALL, out=tmp_path / "run")
    stored = read_origin(tmp_path / "run")
    assert stored is not None
    assert stored.record.reference.spelled == r"w\x001"
    assert r"w\x001" in stored.arrays["spelled"].values


def test_a_window_of_no_keys_is_seen_when_it_is_measured() -> None:
    """Families that do not use the key may state 0; one that does hides every key, and has no attention."""
    with raises(CheckError, what="NaN", got="sink"):
        pl.measure(small_model("Mistral", sliding_window=0), length=32, prompts=4)
    assert pl.Subject.of(small_model("Llama", sliding_window=0)).identity.windows == (None, None, None)
