"""Resolve the arguments of `measure`, `trace`, `claims` and `advise` into a subject, a spec and prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posleak.inputs import GivenPrompts, Inputs, is_source_name, read_given
from posleak.models import AnyModel, Subject, subject_of

from .spec import GIVEN, LENGTH, PROMPTS, MeasureSpec


@dataclass(frozen=True)
class Request:
    """A resolved request; `given`: prompts that the user passed, None if posleak makes them."""

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
    """Return the subject, the spec and the user's prompts; what can be rejected without the model is rejected before
    it is loaded.

    default     (length, prompts) where None is passed and posleak makes the prompts
    more        further fields of MeasureSpec
    """
    if isinstance(inputs, str) and is_source_name(inputs):
        tokens, count = default[0] if length is None else length, default[1] if prompts is None else prompts
        spec = MeasureSpec(inputs, bos, tokens, count, **more)
        spec.require_effect()
        return Request(subject_of(subject), spec, None)
    loaded = subject_of(subject)
    given = read_given(loaded, inputs, length=length, prompts=prompts, bos=bos)
    count, tokens = given.table.shape
    return Request(loaded, MeasureSpec(GIVEN, bos, tokens, count, **more), given)
