"""What posleak does with pretrained models besides measuring them: settings, losses, memory, training, sweeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import posleak as pl
from posleak.inputs import prepare
from posleak.models import Subject, read_weights
from posleak.peak import PeakMemory
from posleak.runs.loss import loss_positions
from support.runs_tiny import assert_same_bits
from support.sweep_tiny import SMALL, ended, numbers, started, tiny_models, written
from zoo.__main__ import app

NOTES = ("ignore:the origin of 4 tokens is narrower than the sink", "ignore:the sliding window of 512 tokens is longer")
pytestmark = [pytest.mark.real, pytest.mark.filterwarnings(*NOTES)]


def test_settings_of_a_real_model(smollm: Subject, gemma: Subject) -> None:
    """Nothing changed is exactly nothing; a sink that cannot be replaced is missed."""
    asked: dict[str, Any] = {"groups": [], "length": 128, "prompts": 8}
    null, late, cut = pl.advise(smollm, edits=["shift=0", "sink=cut@10-29", "sink=cut"], **asked).effects
    assert all(found.value == found.low == found.high == 0 for found in (*null.leakage.values(), *null.loss.values()))
    assert late.loss["all"].low > 0
    assert abs(float(cut.loss["all"].value)) < float(late.loss["all"].value) / 3, "the next token becomes the sink"
    (missed,) = pl.advise(gemma, edits=["sink=cut"], **{**asked, "length": 64}).effects
    assert missed.simultaneous["loss"].low > 0.5, "also with the wider interval of sentences"


def test_loss_is_the_models_own(smollm: Subject, gemma: Subject) -> None:
    for subject in (smollm, gemma):
        run = pl.measure(subject, length=64, prompts=4, loss=True)
        assert run.loss is not None
        ids = torch.from_numpy(prepare(subject, "random", length=64, seed=0).batch(range(4)))
        labels, at = torch.full_like(ids, -100), torch.tensor(loss_positions(run.record.plan))
        labels[:, at + 1] = ids[:, at + 1]
        with torch.no_grad():
            own = subject.model(input_ids=ids, labels=labels).loss
        assert float(run.loss.numbers["all"].value) == pytest.approx(float(own), rel=1e-5)


@pytest.mark.parametrize("name", ["smollm", "gemma"])
def test_doctor_passes(name: str, request: pytest.FixtureRequest) -> None:
    diagnosis = pl.doctor(request.getfixturevalue(name), prompts=6)
    assert diagnosis.ok, [check for check in diagnosis.checks if not check.ok]
    floors = {check.id: check.value for check in diagnosis.checks if check.id.startswith("floor")}
    assert floors["floor float32"] < 1e-3 < floors["floor bfloat16"], "in bfloat16 rounding is a source of its own"


@pytest.mark.parametrize(
    ("length", "batch", "edits"), [(512, 4, ()), (1024, 1, ()), (512, 4, ("context=borrowed",))], ids=str
)
def test_memory_stays_within_its_plan(smollm: Subject, length: int, batch: int, edits: tuple[str, ...]) -> None:
    read_weights(smollm.model)
    with PeakMemory() as peak:
        run = pl.measure(smollm, length=length, prompts=max(4, batch), batch=batch, edits=edits)
    assert peak.bytes <= run.record.memory.total


def test_a_model_of_the_zoo_learns_the_documentation_on_this_machine(tmp_path: Path) -> None:
    """Real text, a real recipe, a few steps of it: the loss falls clearly, and the model can be measured."""
    asked = ["train", "rope", "--steps", "64", "--out", str(tmp_path), "--json"]
    made = json.loads(CliRunner().invoke(app, asked).stdout)["trainings"][0]
    losses = [point["loss"] for point in made["held_out"]]
    assert losses[0] > 4.3
    assert losses[-1] < 3.25 < made["data"]["unigram_nats"]
    assert {part["name"] for part in made["data"]["parts"]} >= {"Python", "numpy", "scipy"}
    assert made["data"]["tokens"] > 5_000_000
    run = pl.measure(tmp_path / "text" / "rope-0-64", "text:stdlib", length=128, prompts=8)
    assert run.summary.model["all"].power["total"].low > 0


def test_a_sweep_on_ray_gives_the_same_bits_as_one_on_this_machine(tmp_path: Path) -> None:
    """Twelve cells: a tiny model, two of the zoo and SmolLM2 × three edits, on two real workers."""
    models = [*tiny_models(tmp_path, "tiny"), "zoo-text-rope", "zoo-backcopy-rope", "smollm2-135m"]
    edits = ["none", "rope=ntk:4", "window=16"]
    manifest = written(tmp_path / "m.yaml", models=models, edits=edits, **SMALL)
    engines: dict[str, tuple[str, ...]] = {"local": (), "ray": ("--engine", "ray", "--workers", "2")}
    for name, options in engines.items():
        found = ended(started(manifest, tmp_path / name, *options))
        assert found["counts"]["finished"] == found["computed"] == 12
    assert numbers(tmp_path / "local") == numbers(tmp_path / "ray")


LIMITED = """
import re, sys, warnings
import posleak as pl
warnings.simplefilter("ignore")
pl.measure("smollm2-135m", length=256, prompts=2, max_memory="900MB", out=sys.argv[1])
print(1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]))
"""


@pytest.mark.filterwarnings("ignore:too few prompts")
def test_a_process_stays_below_a_limit_that_its_model_exceeds(smollm: Subject, tmp_path: Path) -> None:
    """The peak is that of the system, which counts weights that are mapped from their file, too."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, check=True,
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )  # fmt: skip
    stored = pl.Run.load(tmp_path)
    assert stored.record.machine.offloaded
    assert int(done.stdout) < 900 * 10**6
    assert_same_bits(stored, pl.measure(smollm, length=256, prompts=2, batch=stored.record.spec.batch))
