"""Measurements of trained models and their checkpoints: both decompositions, sinks and position 0.

Models are measured by `trace` (`measure` if a borrowed context is not defined) and `origin`. Results are stored with
each model, in measured.json, and are not measured again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from posleak.analyses.origin.origin import origin
from posleak.analyses.origin.reading import EPSILON
from posleak.analyses.trace.trace import CAUSES, trace
from posleak.axes import PARTS
from posleak.errors import PosleakWarning, UnsupportedError
from posleak.files import Sealed, sole_writer
from posleak.inputs.corpus import STDLIB
from posleak.inputs.prompts import DONOR_MARGIN
from posleak.leakage import Estimate
from posleak.models import Subject, load
from posleak.runs.balance import Balance
from posleak.runs.measure import measure
from posleak.runs.run import Run
from posleak.runs.software import DEFINITIONS_VERSION

from .training import Training

MEASURED = "measured.json"
UNSEEN = 1_000_000
"""Added to the seed of a model for the prompts that it is measured on, which were not used in training."""
EXPECTED_WARNINGS = (
    ".*is beyond the model's context",  # positions of a borrowed context; offsets stay within the context
    "origin keys cannot be moved",  # learned position embeddings
    "the origin of .* tokens is narrower than the sink",
    ".*intervals.* are too narrow",
)
"""Patterns of warnings that are expected for these models; docs/zoo.md explains them."""
PROMPTS = {"text": 32, "backcopy": 64}
"""Number of prompts by kind of data: prompts of backcopy are short and vary more."""


@dataclass(frozen=True)
class Quantity:
    """A quantity that is measured on every model."""

    name: str
    title: str
    about: str
    unit: str

    @property
    def is_power(self) -> bool:
        """Powers are compared by ratio and averaged as geometric means."""
        return self.unit == "nats²"

    @property
    def is_share(self) -> bool:
        """Whether it is shown in percent."""
        return self.unit == "share"

    @property
    def shown_unit(self) -> str:
        """Unit, empty if the quantity is dimensionless."""
        return "" if self.unit == "1" else self.unit


QUANTITIES = {
    quantity.name: quantity
    for quantity in (
        Quantity("total", "leakage", "power of the leakage, mean over layers and heads, all queries", "nats²"),
        Quantity("here", "here", "share of the leakage from the layer's own mask", "share"),
        Quantity("earlier", "earlier", "share from masks of earlier layers, through the residual stream", "share"),
        Quantity("origin", "origin", "share from position 0", "share"),
        Quantity("mask", "mask", "mask part, as a share of the leakage", "share"),
        Quantity("drift", "drift", "drift part, as a share of the leakage", "share"),
        Quantity("sink", "sink", "sink part, as a share of the leakage", "share"),
        Quantity("residual", "residual", "power of the sum of drift and sink", "nats²"),
        Quantity("slope", "slope", "change of the residual from the first layer to the last", "nats² per depth"),
        Quantity(
            "attention", "attention to 0", "attention of late queries to position 0, mean over layers and heads", "1"
        ),
        Quantity("readers", "sinks", f"share of heads whose attention to position 0 exceeds {EPSILON:g}", "share"),
        Quantity(
            "pull",
            "pull",
            "mean cosine similarity of the states of different tokens at middle depth: at position 0 minus elsewhere",
            "1",
        ),
    )
}


@dataclass(frozen=True)
class VariantMeasurement:
    """Results of one model at one step on one source of prompts. `numbers`: estimates by name of the quantity."""

    step: int
    inputs: str
    prompts: int
    length: int
    seed: int
    definitions: int
    numbers: dict[str, Estimate]


@dataclass(frozen=True)
class AllMeasured:
    """All results of one training: the content of measured.json."""

    found: tuple[VariantMeasurement, ...]

    def of(self, step: int, inputs: str, prompts: int) -> VariantMeasurement | None:
        """Return the results under the current definitions, None if there are none."""
        key = (step, inputs, prompts, DEFINITIONS_VERSION)
        return next((x for x in self.found if (x.step, x.inputs, x.prompts, x.definitions) == key), None)


MEASURED_FORMAT = Sealed(
    "posleak zoo measurements", 1, AllMeasured, "delete it and start `python -m zoo measure` again"
)


def read_measured(folder: Path) -> AllMeasured:
    """Return the stored results of a training, empty if there are none."""
    return MEASURED_FORMAT.read(folder / MEASURED) if (folder / MEASURED).is_file() else AllMeasured(())


def inputs_of(record: Training) -> tuple[str, str]:
    """Return the two sources of prompts: the training data, on which checkpoints are measured too, and random ids."""
    if record.data.data != "text":
        return record.data.data, "random"
    return f"text:{STDLIB if record.data.path is None else record.data.path}", "random"


def length_of(record: Training) -> int:
    """Return the tokens per prompt: short enough that a donor, which is longer, fits into the training context."""
    return record.recipe.context - DONOR_MARGIN


def measure_models(
    folder: Path,
    record: Training,
    *,
    prompts: int | None = None,
    with_checkpoints: bool = True,
    progress: Callable[[str], None] = lambda what: None,
) -> AllMeasured:
    """Measure a finished training, except for stored results. Models of different seeds read different prompts."""
    prompts = PROMPTS[record.data.data] if prompts is None else prompts
    with sole_writer(folder):
        measured = read_measured(folder)
        for path, step, inputs in _planned(folder, record, with_checkpoints):
            if measured.of(step, inputs, prompts) is not None:
                continue
            progress(f"{record.data.data} {record.name}, step {step}, {inputs}")
            length, seed = length_of(record), UNSEEN + record.seed
            with warnings.catch_warnings():
                for expected in EXPECTED_WARNINGS:
                    warnings.filterwarnings("ignore", expected, PosleakWarning)
                estimates = measure_quantities(load(path), inputs, length, prompts, seed)
            new = VariantMeasurement(step, inputs, prompts, length, seed, DEFINITIONS_VERSION, estimates)
            measured = AllMeasured((*measured.found, new))
            MEASURED_FORMAT.write(folder / MEASURED, measured)
    return measured


def _planned(folder: Path, record: Training, with_checkpoints: bool) -> Iterator[tuple[Path, int, str]]:
    """Yield the folder, step and inputs of every measurement of a training."""
    own, random = inputs_of(record)
    *earlier, last = record.recipe.kept_steps
    yield folder, last, own
    yield folder, last, random
    if with_checkpoints:
        yield from ((folder / f"checkpoint-{step}", step, own) for step in earlier)


def measure_quantities(subject: Subject, inputs: str, length: int, prompts: int, seed: int) -> dict[str, Estimate]:
    """Return every quantity of a model by name, without the sources if a borrowed context is not defined."""
    estimates: dict[str, Estimate] = {}
    try:
        traced = trace(subject, inputs, length=length, prompts=prompts, seed=seed)
        run, estimates = traced.ordinary, {name: traced.model["all"].share[name] for name in CAUSES[1:]}
    except UnsupportedError:
        run = measure(subject, inputs, length=length, prompts=prompts, seed=seed)
    balance = Balance.of(run)
    numbers = balance.numbers["all"]
    estimates |= {name: numbers.power[name] for name in ("total", "residual")}
    estimates |= {name: numbers.share[name] for name in PARTS}
    estimates |= {"attention": balance.sink_attention, "readers": _readers(run), "pull": _pull(subject, seed)}
    if len(run.record.calibration.numbers) > 2:  # with two layers, the slope is the residual of the second
        estimates["slope"] = balance.slopes["all"]
    return estimates


def _readers(run: Run) -> Estimate:
    """Return the share of heads that read position 0. n counts heads; there is no interval."""
    attention = np.nanmean(run.data["profile"].values[..., 0], axis=0)  # [L, H]
    heads = attention[np.isfinite(attention)]
    share = np.asarray(float((heads > EPSILON).mean()))
    return Estimate(share, np.asarray(np.nan), np.asarray(np.nan), len(heads))


def _pull(subject: Subject, seed: int) -> Estimate:
    """Return the mean cosine among different tokens at position 0, minus that at other positions, at middle depth."""
    result = origin(subject, prompts=8, seed=seed, probe=False, length=min(128, subject.context or 128))
    middle = len(result.portrait.among.value) // 2
    elsewhere = float(result.trajectory.body.alike[middle])
    at_0 = result.portrait.among[middle]
    return Estimate(at_0.value - elsewhere, at_0.low - elsewhere, at_0.high - elsewhere, at_0.n)
