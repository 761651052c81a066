"""Resolve the arguments of `measure`, `trace`, `claims` and `advise` into a subject, a spec and prompts."""

from __future__ import annotations

from typing import Any

from posleak.defaults import LENGTH, PROMPTS
from posleak.inputs import GivenPrompts, Inputs, is_source_name, read_given
from posleak.models import AnyModel, Subject, subject_of

from .spec import GIVEN, MeasureSpec


def resolve_request(
    subject: AnyModel,
    inputs: Inputs,
    *,
    length: int | None,
    prompts: int | None,
    default_length: int = LENGTH,
    bos: str | int = "auto",
    **more: Any,
) -> tuple[Subject, MeasureSpec, GivenPrompts | None]:
    """Return the subject, the spec, and the prompts that the user passed, None if posleak makes them.

    What can be rejected without the model is rejected before it is loaded.

    default_length   length of the prompts that posleak makes, if `length` is None
    more             further fields of MeasureSpec
    """
    if isinstance(inputs, str) and is_source_name(inputs):
        tokens, count = default_length if length is None else length, PROMPTS if prompts is None else prompts
        spec = MeasureSpec(inputs, bos, tokens, count, **more)
        spec.require_effect()
        return subject_of(subject), spec, None
    loaded = subject_of(subject)
    given = read_given(loaded, inputs, length=length, prompts=prompts, bos=bos)
    count, tokens = given.table.shape
    return loaded, MeasureSpec(GIVEN, bos, tokens, count, **more), given
