"""What a call of `measure`, `trace` or `claims` asks for: which subject, which prompts, and the rest as a spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posleak.inputs import GivenPrompts, Inputs, is_source_name, read_given
from posleak.models import AnyModel, Subject, subject_of

from .spec import GIVEN, LENGTH, PROMPTS, MeasureSpec


@dataclass(frozen=True)
class Request:
    """`given`: prompts that were handed over; None where posleak makes them."""

    subject: Subject
    spec: MeasureSpec
    given: GivenPrompts | None


def resolve_request(
    subject: AnyModel,
    inputs: Inputs,
    *,
    length: int | None,
    prompts: int | None,
    default: tuple[int, int] = (LENGTH, PROMPTS),
    bos: str | int = "auto",
    **more: Any,
) -> Request:
    """`default`: length and number of prompts where the call names none and posleak makes the prompts.

    What can be refused without the model is refused before it is loaded.
    """
    if isinstance(inputs, str) and is_source_name(inputs):
        tokens, count = default[0] if length is None else length, default[1] if prompts is None else prompts
        spec = MeasureSpec(inputs, bos, tokens, count, **more)
        spec.require_effect()
        return Request(subject_of(subject), spec, None)
    who = subject_of(subject)
    given = read_given(who, inputs, length=length, prompts=prompts, bos=bos)
    count, tokens = given.table.shape
    return Request(who, MeasureSpec(GIVEN, bos, tokens, count, **more), given)
