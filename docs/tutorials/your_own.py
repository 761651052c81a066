# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 2. Your own model, data, edit and observer
#
# For a researcher who wants to ask something that posleak does not ask: everything that is measured can be yours. The
# models here are small ones that come with posleak, so that the page runs in a minute.

# %%
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import posleak as pl
from posleak.show.numbers import estimate

# %% [markdown]
# ## A model in memory
#
# Any causal language model of transformers; here one with random weights. Before training, all leakage is the mask's:
# random weights write nothing about position that others could read.

# %%
torch.manual_seed(0)
config = LlamaConfig(vocab_size=99, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
mine = pl.Subject.of(LlamaForCausalLM(config).eval(), name="mine")
run = pl.measure(mine, length=64, prompts=8, bos="none")
share = run.summary.model["all"].share["mask"]
print(f"mask: {estimate(share, 'share')}, n = {share.n}")

# %% [markdown]
# ## Your own prompts
#
# Ids, texts or chats. The small text model reads characters.

# %%
subject = pl.load("zoo-text-rope")
texts = [f"def function_{k}(argument): return argument + {k}  # and so on, and so on, for a while" for k in range(8)]
run = pl.measure(subject, texts, length=64)
total = run.summary.model["all"].power["total"]
print(f"leakage: {estimate(total)} nats², n = {total.n}")

# %% [markdown]
# ## An edit
#
# A what-if is a text, or an object of your own: it gets every attention call and returns another one. This one lets
# queries attend twice as sharply.

# %%
from dataclasses import replace

from posleak.probe import Edit


class Sharper(Edit):
    def edit(self, call):
        return replace(call, query=2 * call.query)


asked = {"length": 128, "prompts": 8, "seed": 0}
before, after = pl.measure(subject, **asked), pl.measure(subject, edits=Sharper(), **asked)
for name, found in (("as it is", before), ("sharper", after)):
    print(f"{name}: {estimate(found.summary.model['all'].power['mask'])} nats² of mask")

# %% [markdown]
# ## An observer
#
# It looks at every attention call and changes nothing: here, how much attention late queries give to the token before them.


# %%
class Previous:
    def __init__(self):
        self.seen = {}

    def observe(self, call, out):
        logits = (call.query[:, :, -1:] @ call.key[:, :, -8:].repeat_interleave(call.heads // call.key.shape[1], 1).mT) * call.scaling
        self.seen.setdefault(call.layer, []).append(float(logits.softmax(-1)[..., -2].mean()))


looker = Previous()
pl.measure(subject, observers=looker, **asked)
for layer, values in looker.seen.items():
    print(f"layer {layer}: {np.mean(values):.3f} of the attention among the last eight")

# %% [markdown]
# [Extending posleak](../extending.md) registers edits, inputs, metrics and claims of your own for the command line.
