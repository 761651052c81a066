"""The cases: the plain forward pass, posleak, and the peers, with the same model, tokens and statistics.

Only the case with loss computes the language-model head, whose cost would hide the differences.
"""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from posleak.edits import parse_edits
from posleak.edits.context import BRANCHED, Branches
from posleak.inputs.prompts import DONOR_MARGIN
from posleak.models import Subject, exclusive, input_device
from posleak.probe import Plan, Visibility, backbone
from posleak.probe.native import native
from posleak.runs.loop import Passes
from posleak.runs.placements import placements_of
from posleak.runs.prepared import PreparedRun, calibrated
from posleak.runs.spec import MeasureSpec
from posleak.sweeps.cells import Cell
from posleak.sweeps.state import State, status_of
from posleak.sweeps.storage import Storage
from posleak.sweeps.work import Worker

from . import memory
from .statistics import Statistics, from_chunk, from_patterns, from_scores

FORWARD = "forward"
"""The case that the others are compared with."""

POSLEAK = "posleak"
ONCE = "posleak, once per run"
BRANCHES_PASS, TRACE = "branches", "posleak trace"
"""One plain pass over the tokens of the branches with their mask; the whole trace, compared with it: the prompt alone,
the branches, their parts and arrays."""

RUN, WITH_METRICS, WITH_LOSS = "whole measurement", "whole measurement, all metrics", "whole measurement, loss"
"""A whole measurement: alone, with metrics of other papers, and with the next-token loss."""

STORED, CELL = "whole measurement, kept", "cell of a sweep"
"""A measurement that writes a folder; the same as a cell of a sweep, by a worker that has loaded the model."""

Ids = NDArray[np.int64]
Runner = Callable[[Ids], Statistics | None]
"""Makes one pass over ids [B, T]; returns None if it computes no statistics."""


@dataclass(frozen=True)
class Case:
    """One case of the benchmark.

    make      prepares a subject for prompts with the shape of ids [B, T], and returns the function to time
    needs     memory that the case needs
    package   package of a peer;  base: the case that its time is divided by
    """

    name: str
    make: Callable[[Subject, Plan, Ids], Runner]
    needs: memory.Needs
    package: str | None = None
    base: str = FORWARD

    @property
    def is_peer(self) -> bool:
        """Whether it is another tool, whose results are compared with those of posleak."""
        return self.name == "eager" or self.package is not None

    @property
    def missing(self) -> bool:
        """Whether the package of the peer is not installed."""
        return self.package is not None and importlib.util.find_spec(self.package.replace("-", "_")) is None

    @property
    def version(self) -> str | None:
        """Version of the package of a peer, None without one."""
        return None if self.package is None or self.missing else version(self.package)


def _forward(subject: Subject, plan: Plan, ids: Ids) -> Runner:
    def run(ids: Ids) -> None:
        _forward_pass(subject.model, ids)

    return run


def _posleak(*edits: str) -> Callable[[Subject, Plan, Ids], Runner]:
    def make(subject: Subject, plan: Plan, ids: Ids) -> Runner:
        parsed = parse_edits(edits)
        passes = Passes(subject.model, plan, parsed, placements_of(subject.model, ids, plan, parsed))

        def run(ids: Ids) -> Statistics:
            (chunk,) = passes.measure([ids])
            return from_chunk(chunk)

        return run

    return make


def _branches_pass(subject: Subject, plan: Plan, ids: Ids) -> Runner:
    edit, documents = Branches(), after_donor(ids)
    layout, T = edit.layout(documents.shape[1]), edit.sequences(ids.shape[1])[1]
    mask = edit.branched(layout, Visibility((1, 1, T, T), causal_mask_function, device=subject.device))[1].dense()

    def run(ids: Ids) -> None:
        tokens, positions = layout.arrange(torch.from_numpy(after_donor(ids)).to(subject.device))
        native(subject.model, tokens, padding=mask, position_ids=positions)

    return run


def _trace(subject: Subject, plan: Plan, ids: Ids) -> Runner:
    plain, second = _posleak()(subject, plan, ids), _posleak(BRANCHED)(subject, plan, after_donor(ids))

    def run(ids: Ids) -> None:
        plain(ids)
        second(after_donor(ids))

    return run


def _run(metrics: str = "none", loss: bool = False) -> Callable[[Subject, Plan, Ids], Runner]:
    """Return the case of a whole measurement, from calibration to summary, with prompts as long as ids."""

    def make(subject: Subject, plan: Plan, ids: Ids) -> Runner:
        spec = memory.run_spec(ids.shape[1], metrics, loss)

        def run(ids: Ids) -> None:
            measured = PreparedRun.of(subject, spec).run()
            _ = measured.metrics.as_dict() if measured.metrics is not None else None

        return run

    return make


def _stored(subject: Subject, plan: Plan, ids: Ids) -> Runner:
    """Return the case of a measurement that writes a folder, as `posleak measure` does after loading."""
    spec = memory.run_spec(ids.shape[1])

    def run(ids: Ids) -> None:
        with tempfile.TemporaryDirectory(prefix="posleak-") as folder:
            _ = PreparedRun.of(subject, spec).run(Path(folder) / "run").summary

    return run


def _cell(subject: Subject, plan: Plan, ids: Ids) -> Runner:
    """Return the case of a cell of a sweep: look up, lock, measure, write results and hashes, look up again."""
    spec = memory.run_spec(ids.shape[1])
    cell = Cell(subject.identity.name, MeasureSpec(length=spec.length, prompts=spec.prompts))

    def run(ids: Ids) -> None:
        with tempfile.TemporaryDirectory(prefix="posleak-") as folder:
            storage = Storage(folder)
            worker = Worker()
            worker.hold(cell, subject)
            outcome = worker.run(storage, cell)
            assert outcome.state is State.finished, outcome.why
            assert status_of(storage, cell).state is State.finished

    return run


def after_donor(ids: Ids) -> Ids:
    """Return each prompt after a longer document made of its own tokens. The content does not affect the cost."""
    return np.concatenate([ids, ids[:, -DONOR_MARGIN:], ids], axis=1)


def _once(subject: Subject, plan: Plan, ids: Ids) -> Runner:
    """Return the case of what a run does before its first prompt: calibration, and reading the placements."""

    def run(ids: Ids) -> None:
        calibrated(subject, ids)
        placements_of(subject.model, ids, plan)

    return run


def _eager(subject: Subject, plan: Plan, ids: Ids) -> Runner:
    model, rows = _with_eager_attention(subject), list(plan.rows)

    def run(ids: Ids) -> Statistics:
        output = _forward_pass(model, ids, output_attentions=True)
        return from_patterns([a[:, :, rows] for a in output.attentions], plan)

    return run


def _transformer_lens(subject: Subject, plan: Plan, ids: Ids) -> Runner:
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(
        subject.identity.name,
        hf_model=_copied(subject),
        tokenizer=subject.tokenizer,
        dtype=subject.model.dtype,
    )
    rows = list(plan.rows)

    def run(ids: Ids) -> Statistics:
        with torch.inference_mode():
            _, cache = bridge.run_with_cache(
                torch.from_numpy(ids).to(subject.device),
                names_filter=lambda name: name.endswith(("hook_attn_scores", "hook_pattern")),
                logits_to_keep=1,
            )
        layers = range(bridge.cfg.n_layers)
        return from_scores([cache[f"blocks.{layer}.attn.hook_attn_scores"][:, :, rows] for layer in layers], plan)

    return run


def _nnsight(subject: Subject, plan: Plan, ids: Ids) -> Runner:
    from nnsight import NNsight

    traced, rows = NNsight(backbone(_with_eager_attention(subject))), list(plan.rows)

    def run(ids: Ids) -> Statistics:
        tokens = torch.from_numpy(ids).to(subject.device)
        with (
            torch.inference_mode(),
            traced.trace(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False),
        ):
            patterns = list().save()  # type: ignore[attr-defined]  # noqa: C408  nnsight gives lists a method inside a trace
            for layer in traced.layers:
                patterns.append(layer.self_attn.output[1][:, :, rows])
        return from_patterns(patterns, plan)

    return run


def _with_eager_attention(subject: Subject) -> PreTrainedModel:
    model = _copied(subject)
    model.set_attn_implementation("eager")
    return model


def _copied(subject: Subject) -> PreTrainedModel:
    """Return a copy of the model with its own config."""
    with exclusive(subject.model):
        return copy.deepcopy(subject.model)


def _forward_pass(model: PreTrainedModel, ids: Ids, **options: Any):  # type: ignore[no-untyped-def]
    """Run the model's own forward pass without the language-model head."""
    return native(model, torch.from_numpy(ids).to(input_device(model)), **options)


CASES = (
    Case(FORWARD, _forward, memory.forward),  # the model's own pass with fused attention, without observers
    Case(
        POSLEAK, _posleak(), memory.posleak()
    ),  # the same pass with the sampled rows, the decomposition and the arrays
    Case(ONCE, _once, memory.posleak()),
    Case("posleak sink=cut", _posleak("sink=cut"), memory.posleak("sink=cut")),
    Case(BRANCHES_PASS, _branches_pass, memory.branches),  # one plain pass over all branches with a dense mask
    Case(TRACE, _trace, memory.trace, base=BRANCHES_PASS),
    Case(RUN, _run(), memory.run()),  # 8,192 tokens, as `posleak measure` does it, without writing
    Case(WITH_METRICS, _run("all"), memory.run("all"), base=RUN),
    Case(WITH_LOSS, _run(loss=True), memory.run(loss=True), base=RUN),
    Case(STORED, _stored, memory.run(), base=RUN),
    Case(CELL, _cell, memory.run(), base=STORED),  # what a sweep adds to a measurement
    Case("eager", _eager, memory.patterns(1, layers=True)),  # patterns of all layers kept: total leakage
    # scores and patterns of all layers cached: all parts
    Case("TransformerLens", _transformer_lens, memory.patterns(2, layers=True), "transformer-lens"),
    # sampled rows of the patterns kept inside the trace: total leakage
    Case("nnsight", _nnsight, memory.patterns(2, layers=False), "nnsight"),
)


def case(name: str) -> Case:
    """Return a case by name."""
    return next(each for each in CASES if each.name == name)
