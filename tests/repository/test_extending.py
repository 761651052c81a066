"""The examples of docs/extending.md run as written: in Python, on the page of a report, and in a shell."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import posleak as pl
from posleak import inputs
from posleak.analyses.claims.catalogue import REGISTRY, Verdict, registry
from posleak.edits import KINDS, parse_edit, parse_edits
from posleak.errors import InputError
from posleak.inputs import prepare
from posleak.leakage.power import unbiased
from posleak.metrics import catalogue
from posleak.plugins import ENTRY_POINT_GROUP, ENVIRONMENT_VARIABLE, load_plugins
from support.errors import raises
from support.families import subject, tiny
from support.runs_tiny import assert_same_bits

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
REGISTRIES: tuple[dict[str, Any], ...] = (KINDS, REGISTRY, inputs.SOURCE_KINDS, catalogue.PLUGIN_METERS)
SMALL: dict[str, Any] = {"length": 64, "prompts": 4}


def blocks(language: str) -> list[str]:
    """Return the fenced code blocks of the page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.M | re.S)


MODULES = {match[1]: block for block in blocks("python") if (match := re.match(r"# (\w+)\.py\n", block))}
SNIPPETS = [block for block in blocks("python") if block not in MODULES.values()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Write the modules of the page into an importable folder; restore the registries afterwards."""
    registry()  # claims are registered once per process, which must happen before the registries are copied
    copies = [dict(each) for each in REGISTRIES]
    for name, block in MODULES.items():
        (tmp_path / f"{name}.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    load_plugins.cache_clear()
    yield tmp_path
    for each, before in zip(REGISTRIES, copies, strict=True):
        each.clear()
        each.update(before)
    for name in MODULES:
        sys.modules.pop(name, None)
    load_plugins.cache_clear()


@pytest.fixture
def plugins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Name the edit, the claim, the input and the meter as plugins, without importing them."""
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "my_claim, my_input, my_meter")
    return folder


def soft_llama() -> pl.Subject:
    return subject(name="tiny", scale=3.0)


def power(run: pl.Run, name: str = "total") -> float:
    return float(run.summary.model["all"].power[name].value)


def test_the_page_has_one_short_module_of_each_kind() -> None:
    assert list(MODULES) == ["my_observer", "my_meter", "my_edit", "my_claim", "my_input"]
    for name, block in MODULES.items():
        assert sum(bool(line.strip()) for line in block.splitlines()) < 30, name


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_every_snippet_runs(
    snippet: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pl, "load", lambda name: soft_llama())
    exec(snippet, {})
    assert capsys.readouterr().out


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_the_observer_sees_every_layer_as_the_models_own_attention_does(family: str, folder: Path) -> None:
    """gpt_oss has windows, and learned sink logits, which take weight from the keys."""
    model = tiny(family, scale=3.0)
    model.set_attn_implementation("eager")
    model_subject = pl.Subject.of(model, name="tiny")
    entropy = importlib.import_module("my_observer").entropy(model_subject, length=48, prompts=3)
    ids = torch.from_numpy(prepare(model_subject, "random", length=48, seed=0).batch(range(3)))
    with torch.inference_mode():
        weights = model(ids, output_attentions=True).attentions
    expected = torch.stack([torch.special.entr(a[:, :, 24:]).sum(-1).mean((0, 2)) for a in weights])
    assert entropy.shape == (model.config.num_hidden_layers, model.config.num_attention_heads)
    torch.testing.assert_close(entropy, expected, rtol=1e-4, atol=1e-5)


def test_the_meter_leaves_the_distances_of_the_models_own_attention(plugins: Path) -> None:
    model = tiny("llama", scale=3.0)
    model.set_attn_implementation("eager")
    who = pl.Subject.of(model, name="tiny")
    run = pl.measure(who, **SMALL, metrics="reach", out=plugins / "run")
    ids = torch.from_numpy(prepare(who, "random", length=64, seed=0).batch(range(4)))
    with torch.inference_mode():
        weights = torch.stack(model(ids, output_attentions=True).attentions, dim=1)
    at = torch.arange(64)
    expected = (weights * (at[:, None] - at)).sum(-1).mean(-1)
    assert run.data["reach"].dims == ("prompt", "layer", "head")
    np.testing.assert_allclose(run.data["reach"].values, expected.numpy(), rtol=1e-4)
    assert_same_bits(run, pl.Run.load(plugins / "run"))
    with raises(InputError, got="reached", remedy="'reach'"):
        pl.measure(who, **SMALL, metrics="reached")


def test_the_edit_changes_the_numbers_as_weaker_queries_do(plugins: Path) -> None:
    weaker = soft_llama()
    for name, parameter in weaker.model.named_parameters():
        if "q_proj" in name:
            parameter.mul_(0.5)
    edited = pl.measure(soft_llama(), **SMALL, edits=["temperature=2"])
    assert edited.record.spec.edit_texts == ("temperature=2.0",)
    assert power(edited) == pytest.approx(power(pl.measure(weaker, **SMALL)), rel=1e-5)
    assert abs(power(edited) / power(pl.measure(soft_llama(), **SMALL)) - 1) > 0.05


def test_the_edits_neutral_value_changes_no_bit(plugins: Path) -> None:
    plain, neutral = (pl.measure(soft_llama(), **SMALL, edits=texts) for texts in ((), ("temperature=1",)))
    assert_same_bits(plain, neutral)


def test_the_edit_is_parsed_and_refused_like_any_other(plugins: Path) -> None:
    edit = parse_edit("temperature=0.1")
    assert parse_edit(edit.text) == edit
    assert [each.text for each in parse_edits(["window=9", "temperature=3"])] == ["temperature=3.0", "window=9"]
    for unreadable in ("temperature=0", "temperature=warm", "temperature=2@3"):
        with raises(InputError, where=unreadable, expected="temperature=T"):
            parse_edit(unreadable)
    with raises(InputError, where="--edit temperature=2.0 --edit temperature=3.0", got="logits"):
        parse_edits(["temperature=2", "temperature=3"])


def test_the_claim_gets_a_verdict_and_a_place_on_the_page(plugins: Path) -> None:
    claims = pl.claims(soft_llama(), length=64, prompts=16, out=plugins / "run")
    mine = claims.results[-1]
    assert (mine.number, mine.id) == (100, "softer.mask")
    assert len(claims.results) == len(registry()) > 20
    assert mine.verdict in (Verdict.SUPPORTED, Verdict.CONTRADICTED)
    assert mine.edited is not None
    after = pl.measure(soft_llama(), length=64, prompts=16, edits="temperature=2")
    masks = (run.weighted_by(claims.run)["all"].averaged((0, 1)).own["mask"] for run in (after, claims.run))
    one, other = (unbiased(mask, 16) for mask in masks)  # both weighted by the baseline's attention
    assert mine.effect == pytest.approx(float(one / other))

    page = pl.report(plugins / "run", plugins / "page.html").read_text(encoding="utf-8")
    assert f"<b>{mine.title}</b>" in section(page, "answer")
    assert f"100. {mine.claim}" in section(page, "answer")
    assert f"{mine.edited.about} <code>temperature=2</code>" in section(page, "edits")


def section(page: str, name: str) -> str:
    """Return one section of a report as HTML."""
    return page.split(f'<section data-section="{name}"')[1].split("</section>")[0]


def test_the_input_makes_prompts_with_the_frequencies_that_it_names(plugins: Path) -> None:
    who = soft_llama()
    prompts = prepare(who, "zipf:1", length=64, seed=5)
    ids, allowed = prompts.batch(range(2000)), prompts.vocabulary.allowed
    expected = (weights := 1 / np.arange(1, len(allowed) + 1)) / weights.sum()
    frequencies = (ids[:, 1:].reshape(-1, 1) == allowed).mean(0)
    assert (np.abs(frequencies - expected) < 5 * np.sqrt(expected / ids[:, 1:].size)).all()  # standard errors
    assert (ids[:, 0] == who.model.config.bos_token_id).all()
    assert np.array_equal(prompts.batch([7])[0], ids[7])

    run = pl.measure(who, inputs="zipf:1", **SMALL)
    assert (run.record.inputs.source, run.record.inputs.other) == ("zipf:1", {"ranked_by": "token id"})
    assert power(run) != power(pl.measure(who, **SMALL))
    for unreadable in ("zipf", "zipf:", "zipf:steep"):
        with raises(InputError, expected="zipf:"):
            prepare(who, unreadable, length=64, seed=5)


def test_a_package_names_its_module_as_an_entry_point(folder: Path) -> None:
    (block,) = blocks("toml")
    named = tomllib.loads(block)["project"]["entry-points"][ENTRY_POINT_GROUP]
    information = folder / "mine-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    lines = [f"[{ENTRY_POINT_GROUP}]", *(f"{name} = {module}" for name, module in named.items())]
    (information / "entry_points.txt").write_text("\n".join(lines))
    importlib.invalidate_caches()
    assert "softer.mask" in [claim.id for claim in registry()]
    assert "temperature" in KINDS
    assert "my_claim" in load_plugins()


def test_a_plugin_that_cannot_be_imported_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "my_edit,no_such_plugin")
    with raises(
        InputError, where="no_such_plugin", got="ModuleNotFoundError", remedy=("PYTHONPATH", "POSLEAK_PLUGINS")
    ):
        parse_edit("window=9")


def test_the_commands_of_the_page_run_in_a_shell(tmp_path: Path, folder: Path) -> None:
    """Commands run in another process; plugins are named by the environment only."""
    (script,) = blocks("sh")
    soft_llama().model.save_pretrained(str(folder / "model"))
    script = script.replace("smollm2-135m", "./model").replace("--length 256 --prompts 8", "--length 64 --prompts 4")
    place = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": place, "POSLEAK_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(["sh", "-eu"], input=script, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "zipf:1" in done.stdout
    assert "100. Softer attention frees the mask" in done.stdout
    assert "Softer attention frees the mask" in (folder / "mine.html").read_text(encoding="utf-8")
    (measured,) = (path.parent for path in (folder / "runs").glob("model-*/run.json"))
    for name in ("my_edit", "my_input", "my_meter"):
        importlib.import_module(name)
    run = pl.Run.load(measured)
    assert run.record.spec.edit_texts == ("temperature=2.0",)
    assert run.data["reach"].shape == (4, *run.summary.heads["all"].power["total"].value.shape)
