"""A tiny model with a planted circuit."""

from __future__ import annotations

from typing import Any

import torch

from posleak.models import Subject

from .families import tiny

LENGTH = 40
"""Tokens of prompts on which the planted writer is found."""


def counting(seed: int = 0) -> Subject:
    """A model whose head 1 of layer 0 writes a count: it attends uniformly, and only position 0 has a value there."""
    model: Any = tiny("llama", seed=seed, scale=4.0, num_key_value_heads=3)
    width, attention, head = model.config.hidden_size, model.model.layers[0].self_attn, slice(10, 20)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        bos = embedding[1] / embedding[1].norm()
        others = torch.arange(len(embedding)) != 1
        embedding[others] -= (embedding[others] @ bos)[:, None] * bos
        attention.q_proj.weight[head] = 0
        attention.v_proj.weight[head] = 0
        attention.v_proj.weight[10] = bos
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.02
        attention.o_proj.weight[:, 10] = torch.randn(width, generator=torch.Generator().manual_seed(1))
    return Subject.of(model, name="counting")
