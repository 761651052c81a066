# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Your own model, data, edit and observer
#
# For a researcher who wants to ask something that posleak does not ask: every part of a measurement can be yours. The
# models here are tiny, so that the page runs in a minute.

# %%
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import posleak as pl
from posleak.leakage import Jackknife
from posleak.probe import Call, Edit
from posleak.show.numbers import estimate

# %% [markdown]
# ## A model in memory
#
# Any causal language model of transformers, however it came about; here one with random weights. A model that has not
# been trained leaks position already, and nearly all of it through the mask: nothing in its states has learned to.

# %%
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=99,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
)
mine = pl.Subject.of(LlamaForCausalLM(config).eval(), name="mine")
run = pl.measure(mine, length=64, prompts=16, bos="none")
share = run.summary.model["all"].share["mask"]
print(f"mask: {estimate(share, 'share')} of the leakage, n = {share.n}")

# %% [markdown]
# ## Prompts of your own
#
# Texts, token ids or chats. `zoo-text-rope` comes with posleak: a small model that was trained on Python's
# documentation, letter by letter. Prompts must be equally long, or be cut to a length.

# %%
subject = pl.load("zoo-text-rope")
documents = [getattr(str, name).__doc__ or "" for name in dir(str)]
texts = [text for text in documents if len(text) >= 64]
run = pl.measure(subject, texts, length=64, prompts=16)
total = run.summary.model["all"].power["total"]
print(f"leakage: {estimate(total)} nats², n = {total.n}")
for note in run.record.warnings:
    print(f"note: {note}")

# %% [markdown]
# ## An edit: what if?
#
# Many have names, as in `edits="window=64"` ([edits](../edits.md)). One of your own is an object with a method that
# gets every attention call and returns another one. This one doubles the logits. Two runs with one seed read the same
# tokens, so that their difference can be taken prompt by prompt.


# %%
@dataclass
class Sharper(Edit):
    factor: float

    def edit(self, call: Call) -> Call:
        return replace(call, scaling=call.scaling * self.factor)


asked = {"length": 128, "prompts": 16, "seed": 0}
before = pl.measure(subject, **asked)
after = pl.measure(subject, edits=Sharper(2.0), **asked)
for name, found in (("as it is", before), ("sharper", after)):
    print(f"{name}: mask {estimate(found.summary.model['all'].power['mask'])} nats²")
rows = pl.compare([before, after]).rows
difference = next(row for row in rows if row.minus is not None and row.queries == "all")
print(f"difference of the total: {estimate(difference.cells['total'])} nats²")
print(f"paired: {difference.paired}")

# %% [markdown]
# ## An observer: what happens there?
#
# An object with a method `observe(call, out)`; it sees every attention call, and changes nothing. This one asks how
# much attention late queries give to the token before them. `call.logits(rows)` computes the rows that you ask for, and
# no others.


# %%
@dataclass
class Previous:
    seen: dict[int, list[float]] = field(default_factory=dict)

    def observe(self, call: Call, out: torch.Tensor) -> None:
        rows = torch.arange(96, 128)
        hidden = ~call.visibility.rows(rows)
        logits = call.logits(rows).masked_fill(hidden, -torch.inf)
        attention = logits.softmax(-1)  # prompts, heads, rows, keys
        before = attention[..., torch.arange(32), rows - 1]
        self.seen.setdefault(call.layer, []).append(float(before.mean()))


looker = Previous()
pl.measure(subject, observers=looker, **asked)
for layer, values in looker.seen.items():
    print(f"layer {layer}: {np.mean(values):.3f} of the attention")

# %% [markdown]
# ## Numbers of your own, with intervals
#
# The jackknife behind all intervals takes means over prompts, and smooth functions of them. Here: does the mean leakage
# of layer 0 differ between the first and the second half of its heads?

# %%
parts = pl.split(before, prompts=True).sel(component="total", layer=0)
heads = parts.mean(("query", "offset"))  # prompts, heads
halves = heads.sel(head=[0, 1]).mean("head") - heads.sel(head=[2, 3]).mean("head")
found = Jackknife(before.prompts).mean(halves.values).estimate
print(f"halves: {estimate(found)} nats, n = {found.n}")

# %% [markdown]
# [Extending posleak](../extending.md) goes on from here: edits, inputs, metrics and claims of your own with names, on
# the command line, in run folders and on the page.
