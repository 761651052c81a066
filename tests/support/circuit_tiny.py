"""A tiny model with a planted circuit."""

from __future__ import annotations

from typing import Any

import torch

from posleak.analyses.circuit.lending import LendingPasses, LendingStudy
from posleak.inputs import prepare
from posleak.models import Subject
from posleak.probe import default_plan

from .families import tiny

LENGTH = 40
"""Tokens of prompts on which the planted writer is found."""


def counting(seed: int = 0, writers: tuple[int, ...] = (1,), strength: float = 1.0) -> Subject:
    """A model in which heads of layer 0 write a count: they attend uniformly, and only position 0 has a value there.

    writers    these heads, each with the same share of the count
    strength   size of what they write together; later layers answer linearly to a small one
    """
    model: Any = tiny("llama", seed=seed, scale=4.0, num_key_value_heads=3)
    width, attention = model.config.hidden_size, model.model.layers[0].self_attn
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        bos = embedding[1] / embedding[1].norm()
        others = torch.arange(len(embedding)) != 1
        embedding[others] -= (embedding[others] @ bos)[:, None] * bos
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.02
        direction = torch.randn(width, generator=torch.Generator().manual_seed(1))
        for head in writers:
            own = slice(10 * head, 10 * head + 10)
            attention.q_proj.weight[own] = 0
            attention.v_proj.weight[own] = 0
            attention.v_proj.weight[10 * head] = bos
            attention.o_proj.weight[:, 10 * head] = strength * direction / len(writers)
    return Subject.of(model, name="counting")


def quiet(line: str) -> None:
    pass


def passes(subject: Subject, inputs: str = "random", count: int = 12, length: int = LENGTH) -> LendingPasses:
    layers, heads = subject.identity.layers, subject.identity.heads
    base = prepare(subject, inputs, length=length, seed=0)
    plan = default_plan(length)
    return LendingPasses(subject, plan, base, range(count), (heads,) * layers, False)


def study(subject: Subject, **more: Any) -> LendingStudy:
    those = passes(subject, **more)
    return LendingStudy(those, those.weight(), None, "test", quiet)
