"""Doctor passes on every family it should, and each of its laws can fail."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from posleak.analyses.doctor import laws
from posleak.analyses.doctor.doctor import Diagnosis, doctor
from posleak.analyses.doctor.laws import Check, DoctorVerdict
from posleak.analyses.doctor.passes import SHIFT, SharedPasses
from posleak.models import Subject
from support.families import FAMILIES, tiny
from tools.shrink import tiny_model


def diagnose(family: str, **options: object) -> Diagnosis:
    return doctor(Subject.of(tiny(family, **options), name=family))  # type: ignore[arg-type]


def check(diagnosis: Diagnosis, start: str) -> Check:
    return next(c for c in diagnosis.checks if c.id.startswith(start))


@pytest.mark.parametrize("family", FAMILIES)
def test_doctor_passes(family: str) -> None:
    diagnosis = diagnose(family)
    assert diagnosis.ok, [c for c in diagnosis.checks if not c.ok]
    floors = [c.value for c in diagnosis.checks if c.id.startswith("floor")]
    assert floors[0] < floors[2] < floors[1], "float32 rounds less than float16, and that less than bfloat16"


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma2"])
def test_doctor_passes_in_float64(family: str) -> None:
    """Rotations and softmaxes are float32 there too, which is no fault of the numbers."""
    diagnosis = diagnose(family, dtype=torch.float64)
    assert diagnosis.ok, [c for c in diagnosis.checks if not c.ok]


def test_a_check_that_could_not_be_made_has_not_passed() -> None:
    assert not Check("x", math.nan, 1.0, "", "").ok
    assert Check("x", 2.0, None, "", "").ok


def test_the_verdict_says_whether_numbers_are_right() -> None:
    passed, measured = Check("a", 0.5, 1.0, "", ""), Check("b", 2.0, None, "", "")
    failed = Check("c", 2.0, 1.0, "", "a law")
    on_purpose = failed.because(lambda: "a table")
    assert [check.mark for check in (passed, measured, failed, on_purpose)] == ["✓", "·", "✗", "!"]
    found = diagnose("llama", num_hidden_layers=1)
    for checks, verdict in (
        ((passed, measured), DoctorVerdict.SOUND),
        ((passed, on_purpose), DoctorVerdict.BY_DESIGN),
        ((on_purpose, failed), DoctorVerdict.WRONG),
    ):
        judged = replace(found, checks=checks)
        assert judged.verdict is verdict
        assert judged.ok is (verdict is DoctorVerdict.SOUND)
        assert judged.as_dict()["verdict"] == verdict.value
    assert replace(found, checks=(passed, on_purpose, passed)).sentence.endswith(": c")


# Frequencies that depend on the largest position

DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
LONG: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 256,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4], "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0],
}  # fmt: skip


@pytest.mark.parametrize(
    ("rope", "context"), [(DYNAMIC, 256), (DYNAMIC, 64), (LONG, 2048)], ids=["dynamic", "grown", "longrope"]
)
def test_moving_frequencies_are_named(rope: dict[str, Any], context: int) -> None:
    """`grown`: the prompts are longer than the context, so that their own passes move the frequencies, too."""
    model = tiny("llama", rope_parameters=rope, max_position_embeddings=context)
    found = doctor(Subject.of(model, name="m"), short=True)
    assert [c.id for c in found.checks if not c.ok] == ["L5 shift"]
    cause = str(check(found, "L5").cause)
    assert "rotary frequencies" in cause
    assert "largest position" in cause
    far = found.length + SHIFT - 1
    assert f"at position {far} instead of {found.length}" in cause
    assert found.verdict is DoctorVerdict.BY_DESIGN


def test_long_factors_on_both_sides_of_the_shift_are_no_cause() -> None:
    """Prompts beyond the original context are read with long factors before and after the shift: the law holds."""
    model = tiny("llama", rope_parameters={**LONG, "original_max_position_embeddings": 64})
    assert doctor(Subject.of(model, name="m"), short=True).ok


def test_a_rotation_that_does_not_move_is_not_blamed() -> None:
    passes = SharedPasses(tiny("llama"), _plan(), _ids(), _ids(constant=True))
    assert laws._dynamic_frequencies(passes, 64) is None


# Passes are shared


def test_each_law_reads_no_more_than_it_needs() -> None:
    """Tokens that go through the last layer, in prompts: the laws share their passes, and the statistical law, which is
    about the first layer, ends its pass there."""
    model = tiny("llama")
    read = {"first": 0, "last": 0}

    def counted(name: str) -> Any:
        def count(_: torch.nn.Module, args: Any, out: torch.Tensor) -> None:
            read[name] += out.shape[0] * out.shape[1]

        return count

    for name, layer in (("first", "model.layers.0.self_attn.q_proj"), ("last", "model.layers.2.self_attn.q_proj")):
        model.get_submodule(layer).register_forward_hook(counted(name))
    found = doctor(Subject.of(model, name="m"))
    assert found.ok
    assert read["last"] < 20 * found.length, "it was 50 when every law made passes of its own"
    assert read["first"] == read["last"] + found.prompts * found.length


def test_floors_give_the_weights_back() -> None:
    model = tiny("llama")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    doctor(Subject.of(model, name="m"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_floors_of_a_model_without_position_ids_are_not_measured() -> None:
    found = doctor(Subject.of(tiny_model("bart"), name="bart"), length=48, prompts=4)
    assert math.isnan(check(found, "floor bfloat16").value)
    assert "position ids" in check(found, "floor bfloat16").why


def test_learned_positions_break_the_laws_that_say_so() -> None:
    """GPT-2 writes positions into the residual stream: constant tokens differ, and shifts matter."""
    diagnosis = diagnose("gpt2", n_embd=30, n_layer=3, n_head=3, n_positions=2048, n_inner=41)
    assert not check(diagnosis, "L2").ok
    assert not check(diagnosis, "L5").ok
    assert check(diagnosis, "L1").ok
    assert check(diagnosis, "parity").ok


def test_learned_sink_logits_break_the_constant_law_after_the_first_layer() -> None:
    """definitions.md states L2 for any causal model. Weights that do not add up to one are the exception: a head with a
    learned sink logit writes Z/(Z + e^s_aux) of its value, which depends on how many keys it sees."""
    diagnosis = diagnose("gpt_oss")
    assert diagnosis.calibration.learned_sinks
    assert check(diagnosis, "L2").ok
    passes = SharedPasses(tiny("gpt_oss"), _plan(), _ids(), _ids(constant=True), learned_sinks=False)
    assert laws.constant_token(passes).value > 1e-3


def test_law_five_sees_a_rotation_that_is_not_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    body: Any = model.base_model
    rotary = body.rotary_emb
    forward = rotary.forward

    def absolute(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = forward(x, position_ids)
        return cos + 0.01 * position_ids[..., None], sin

    monkeypatch.setattr(rotary, "forward", absolute)
    passes = SharedPasses(model, _plan(), _ids(), _ids(constant=True))
    assert not laws.shifted_positions(passes).ok


def test_law_nine_sees_a_logit_that_misses_the_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved logits are of the late query's row, and have to move with it."""
    from posleak.probe.placement import moved_logits

    passes = SharedPasses(tiny("llama"), _plan(), _ids(), _ids(constant=True))
    assert laws.gauge(passes).ok
    still = "posleak.probe.rows.moved_logits"
    monkeypatch.setattr(still, lambda call, *more: moved_logits(replace(call, bias=None), *more))
    assert laws.gauge(replace(passes)).value > 1


def test_law_ten_is_judged_by_keys_and_says_where_they_stay() -> None:
    found = laws.moved_keys(SharedPasses(tiny("llama"), _plan(), _ids(), _ids(constant=True)))
    assert found.ok
    assert found.bound is not None
    assert 0 < found.value < found.bound
    stays = laws.moved_keys(SharedPasses(tiny("gpt2"), _plan(), _ids(), _ids(constant=True)))
    assert stays.bound is None
    assert "3 of 3 layers" in stays.why


def test_law_seven_sees_a_mask_that_is_off() -> None:
    from posleak.probe import Call, Edit, attach, relative_difference

    class Bidirectional(Edit):
        def edit(self, call: Call) -> Call:
            return replace(call, visibility=call.visibility.with_rule("all", lambda b, h, q, k: (q >= 0) & (k >= 0)))

    model, tokens = tiny("llama"), torch.from_numpy(_ids())
    with attach(model, edits=[Bidirectional()]) as probe:
        within, alone = probe.forward(tokens)[0], probe.forward(tokens[:, :1])[0]
    assert relative_difference(within[:, 0], alone[:, 0]) > 1e-2
    assert laws.closure(SharedPasses(model, _plan(), _ids(), _ids(constant=True))).ok


def _plan():  # type: ignore[no-untyped-def]
    from posleak.probe import default_plan

    return default_plan(67)


def _ids(constant: bool = False):  # type: ignore[no-untyped-def]
    if constant:
        return torch.full((1, 67), 5).numpy()
    return torch.randint(3, 101, (6, 67), generator=torch.Generator().manual_seed(0)).numpy()


@pytest.mark.parametrize(("positions", "said"), [(128, "all position ids by 32"), (96, "96 positions")])
def test_a_table_of_few_positions_is_not_left(positions: int, said: str) -> None:
    """BERT's heirs and the first GPT have 512 positions: moved by 512, a prompt would end in torch's IndexError."""
    model = tiny("gpt2", max_position_embeddings=positions)
    found = doctor(Subject.of(model, name="short"), length=96, prompts=4)
    (shift,) = [check for check in found.checks if check.id == "L5 shift"]
    assert said in shift.why
    assert found.verdict is DoctorVerdict.BY_DESIGN
