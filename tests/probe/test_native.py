"""What a pass needs besides attention: the rotary frequencies of the model, and experts that run in its dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from posleak.analyses.claims.papers.position import rolled_gaps
from posleak.analyses.doctor.doctor import doctor
from posleak.edits import parse_edits
from posleak.errors import PosleakWarning
from posleak.models import Subject
from posleak.probe import attach, calibrate
from posleak.probe.native import native, ungrouped
from posleak.runs.measure import measure
from posleak.runs.run import Run
from support.errors import mentions
from support.families import tiny
from tools.shrink import tiny_model

DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


def growing(context: int = 64) -> PreTrainedModel:
    """Frequencies that grow with passes longer than the context, and stay so in transformers."""
    return tiny("llama", rope_parameters=DYNAMIC, max_position_embeddings=context)


def ids(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(3, 101, (batch, length), generator=torch.Generator().manual_seed(0))


def frequencies(model: PreTrainedModel) -> torch.Tensor:
    buffer: torch.Tensor = model.get_buffer("model.rotary_emb.inv_freq")
    return buffer.clone()


# Frequencies


@pytest.mark.parametrize("how", ["native", "attached", "one attachment"])
def test_a_pass_does_not_depend_on_a_longer_one_before_it(how: str) -> None:
    model, short, long = growing(), ids(100), ids(300)

    def states(*prompts: torch.Tensor) -> list[torch.Tensor]:
        if how == "native":
            return [native(model, each)[0] for each in prompts]
        if how == "attached":
            return [attached(model, each) for each in prompts]
        with attach(model) as probe:
            return [probe.forward(each)[0] for each in prompts]

    expected = states(short)[0]
    assert torch.equal(states(long, short)[1], expected)


def attached(model: PreTrainedModel, prompts: torch.Tensor) -> torch.Tensor:
    with attach(model) as probe:
        states: torch.Tensor = probe.forward(prompts)[0]
    return states


def test_the_model_has_its_frequencies_back() -> None:
    """Including frequencies that a longer pass of the user has left."""
    model = growing()
    fresh = frequencies(model)
    measured(Subject.of(model, name="m"), edits=["shift=512"])
    doctor(Subject.of(model, name="m"), length=100)
    assert torch.equal(frequencies(model), fresh)
    with torch.no_grad():
        model(ids(300))
    grown = frequencies(model)
    assert not torch.equal(grown, fresh)
    rotary: Any = model.get_submodule("model.rotary_emb")
    calibrate(model, ids(100))
    assert torch.equal(frequencies(model), grown)
    assert int(rotary.max_seq_len_cached) == 300


def test_a_measurement_after_a_longer_one_gives_the_same_numbers() -> None:
    subject = Subject.of(growing(), name="m")
    before = measured(subject)
    subject.model(ids(300))
    assert measured(subject).data.equals(before.data)


def measured(subject: Subject, **more: Any) -> Run:
    with pytest.warns(PosleakWarning, match="extrapolation"):
        return measure(subject, length=100, prompts=4, **more)


def test_frequencies_of_kinds_of_layers_are_restored_too() -> None:
    """Gemma 3 has one set for each kind, and transformers adds what it has grown to as a new attribute."""
    rope = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    model = tiny("gemma3_text", rope_parameters=rope, max_position_embeddings=64)
    expected = native(model, ids(100))[0]
    native(model, ids(300))
    assert not hasattr(model.get_submodule("model.rotary_emb"), "full_attention_max_seq_len_cached")
    assert torch.equal(native(model, ids(100))[0], expected)
    with torch.inference_mode():
        body: Any = model.base_model
        body(ids(300))
        body(ids(300))
    assert torch.equal(native(model, ids(100))[0], expected)


# Experts


def setting(model: PreTrainedModel) -> str | None:
    implementation: str | None = model.config._experts_implementation
    return implementation


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "minimax", "qwen3_next", "mixtral"])
def test_mixtures_of_experts_run_in_float64(family: str) -> None:
    model = tiny_model(family)
    assert setting(model) == "grouped_mm"
    narrow = native(model, ids(40) % 100)[0]
    with attach(model, edits=parse_edits(["dtype=float64"])) as probe:
        wide = probe.forward(ids(40) % 100)[0]
        assert setting(model) == "eager"
    assert wide.dtype == torch.float64
    assert torch.allclose(wide.float(), narrow, atol=1e-3)
    assert setting(model) == "grouped_mm"
    model.double()
    assert calibrate(model, ids(40) % 100).ok
    assert setting(model) == "grouped_mm"


def test_the_note_says_that_experts_are_multiplied_one_by_one() -> None:
    subject = Subject.of(tiny_model("mixtral"), name="m")
    with pytest.warns(PosleakWarning, match=mentions("experts", "float64")):
        run = measure(subject, length=40, prompts=4, edits=["dtype=float64"])
    assert any("experts" in note for note in run.record.warnings)
    assert not ungrouped(subject.model, torch.bfloat16)
    assert not ungrouped(tiny("llama"), torch.float64)


def test_the_setting_is_restored_after_an_error() -> None:
    model = tiny_model("mixtral").double()
    with pytest.raises(IndexError):
        native(model, torch.full((1, 40), 10_000))
    assert setting(model) == "grouped_mm"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma3n_text", "hy_v4"])
def test_the_law_of_the_ring_can_be_asked_of_experts_and_of_several_streams(family: str) -> None:
    assert max(rolled_gaps(tiny_model(family), ids(48) % 100, ["dtype=float64", "ring"])) < 1e-12
