"""Tutorials: notebooks agree with their scripts, they run, and the numbers that they print are those of the library.

They are run in the lean form. The stored outputs, of the full form, are compared with other stored results.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import posleak as pl
from posleak.leakage import Estimate
from posleak.leakage.power import unbiased
from posleak.models import Subject
from posleak.runs.loss import loss_by_prompt
from tools.gallery import NUMBERS, read_estimate
from tools.tutorials import execute, notebook, printed_lines, scripts

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "tutorials"
LEAN: dict[str, Any] = {"length": 128, "prompts": 8}
NUMBER = re.compile(r"[−+-]?\d+(?:\.\d+)?(?:e[−-]?\d+)?%?")
pytestmark = pytest.mark.filterwarnings("ignore::posleak.errors.PosleakWarning", "ignore::DeprecationWarning")


def numbers(text: str) -> list[float]:
    """Return the numbers of a text: `31% (20% … 41%)` -> [0.31, 0.2, 0.41]."""
    texts = (each.replace("−", "-") for each in NUMBER.findall(text))
    return [float(each.rstrip("%")) / (100 if each.endswith("%") else 1) for each in texts]


def assert_shows(line: str, estimate: Estimate) -> None:
    """Assert that the last three numbers of a line, before its n, are this estimate."""
    text = line.partition(", n =")[0].replace("nats²", "")
    tolerance = 0.006 if "%" in text else 1e-6
    expected = [float(estimate.value), float(estimate.low), float(estimate.high)]
    assert numbers(text)[-3:] == pytest.approx(expected, rel=6e-2, abs=tolerance), line


def line_with(lines: list[str], start: str) -> str:
    """Return the first line that starts with a text."""
    return next(line for line in lines if line.startswith(start))


@pytest.mark.parametrize("script", scripts(FOLDER), ids=lambda path: path.stem)
def test_a_notebook_is_its_script_and_has_its_outputs(script: Path) -> None:
    stored = nbformat.read(script.with_suffix(".ipynb"), as_version=4)  # type: ignore[no-untyped-call]
    assert [cell.source for cell in stored.cells] == [cell.source for cell in notebook(script).cells]
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run from top to bottom"
    assert list(printed_lines(stored))
    text = script.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|work|Users)/", text), "no local paths"


def stored_lines(name: str) -> list[str]:
    return list(printed_lines(nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)))  # type: ignore[no-untyped-call]


def test_the_stored_numbers_of_one_model_are_those_of_the_gallery() -> None:
    """Both are the same measurement; tests/real/test_real.py repeats it."""
    stored = json.loads((DOCS / "gallery" / NUMBERS).read_text(encoding="utf-8"))["smollm2-135m"]["smollm2-135m"]
    lines = stored_lines("one_model")
    assert_shows(line_with(lines, "leakage"), read_estimate(stored["leakage"]))
    for name, share in stored["shares"].items():
        assert_shows(line_with(lines, name).replace(" of it", ""), read_estimate(share))


@pytest.mark.real
def test_one_model_prints_what_the_library_gives(smollm: Subject) -> None:
    lines = list(printed_lines(execute(FOLDER / "one_model.py", lean=True)))
    run, trace = pl.measure(smollm, **LEAN), pl.trace(smollm, **LEAN)
    assert lines[0] == smollm.identity.short()
    whole = run.summary.model["all"]
    assert_shows(line_with(lines, "leakage"), whole.power["total"])
    for part in ("mask", "drift", "sink"):
        assert_shows(line_with(lines, part).replace(" of it", ""), whole.share[part])
    for source in ("earlier", "here", "origin"):
        assert_shows(line_with(lines, source), trace.model["all"].share[source])
    top = run.heads.iloc[0]
    curve = run.parts().sel(component="total", layer=int(top.layer), head=int(top["head"])).mean("offset")
    for line in lines:
        if line.startswith("query"):
            query, value = numbers(line)
            assert value == pytest.approx(float(curve.sel(query=int(query))), abs=0.006)
    assert lines[-5:] == run.record.caption.split("; ")[-5:]
    assert "8 prompts of 128 tokens" in lines


@pytest.mark.real
def test_settings_print_what_the_library_gives(smollm: Subject) -> None:
    lines = list(printed_lines(execute(FOLDER / "settings.py", lean=True)))
    options: dict[str, Any] = {"length": 64, "prompts": 6, "inputs": "text:stdlib", "loss": True}
    base, cut = pl.measure(smollm, **options), pl.measure(smollm, edits="sink=cut@10-29", **options)
    assert base.loss is not None
    assert_shows(line_with(lines, "as it is: leakage"), base.summary.model["all"].power["total"])
    assert_shows(line_with(lines, "as it is: loss"), base.loss.numbers["all"])
    place = lines.index(line_with(lines, "sink=cut@10-29"))
    changes = [numbers(line.partition(name)[2]) for line, name in zip(lines[place:], ("leakage", "loss"))]
    weighted = (run.weighted_by(base)["all"].own["total"] for run in (cut, base))
    powers = [float(unbiased(np.nanmean(sums, axis=(0, 1)), 6)) for sums in weighted]
    losses = [loss_by_prompt(run.data, base.record.plan)["all"].mean() for run in (cut, base)]
    assert changes[0][0] == pytest.approx(powers[0] - powers[1], rel=1e-2)
    assert changes[1][0] == pytest.approx(losses[0] - losses[1], rel=1e-2)
    assert lines[-1] == "0.0 0.0"


@pytest.mark.real
def test_circuit_prints_what_the_library_gives_and_what_was_stored() -> None:
    lines = list(printed_lines(execute(FOLDER / "circuit.py", lean=True)))
    stored = stored_lines("circuit")
    assert len(lines) == len(stored)
    for line, before in zip(lines[1:], stored[1:]):
        assert numbers(line.partition("sha256")[0]) == pytest.approx(
            numbers(before.partition("sha256")[0]), rel=5e-2, abs=0.011
        )
    found = pl.circuit("zoo-backcopy-nope", length=64, prompts=48)
    assert all(sentence in lines for sentence in found.sentences)
    (writer, _) = found.writing.writers
    assert writer.alone is not None
    assert_shows(line_with(lines, f"writer {writer.name}").partition(" alone")[0], writer.alone)
    row = found.erased("erase", 1)
    assert row is not None
    assert_shows(line_with(lines, row.edit).partition(" of the leakage")[0], row.earlier_removed)


@pytest.mark.real
def test_your_own_prints_what_the_library_gives_and_what_was_stored() -> None:
    lines = list(printed_lines(execute(FOLDER / "your_own.py", lean=True)))
    stored = stored_lines("your_own")
    assert len(lines) == len(stored)
    for line, before in zip(lines, stored):
        assert numbers(line) == pytest.approx(numbers(before), rel=5e-2, abs=0.011), "this page has no lean form"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4
    )
    run = pl.measure(LlamaForCausalLM(config).eval(), length=64, prompts=16, bos="none")
    assert_shows(line_with(lines, "mask").replace(" of the leakage", ""), run.summary.model["all"].share["mask"])
    zoo_run = pl.measure("zoo-text-rope", length=128, prompts=16, seed=0)
    assert_shows(line_with(lines, "as it is"), zoo_run.summary.model["all"].power["mask"])
    per_prompt = zoo_run.parts(prompts=True).sel(component="total", layer=0).mean(("query", "offset")).values
    halves = per_prompt[:, :2].mean(1) - per_prompt[:, 2:].mean(1)
    assert numbers(line_with(lines, "halves"))[0] == pytest.approx(float(np.mean(halves)), rel=2e-2, abs=2e-3)
