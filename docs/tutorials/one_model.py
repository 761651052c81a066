# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # One model: from measurement to a figure for a paper
#
# For a researcher who wants one model's numbers with error bars, and a figure of them. You measure
# SmolLM2-135M-Instruct (4-bit), ask where its position is read and where it comes from, find the heads that matter, and
# save what a paper needs.

# %%
import os

import posleak as pl
from posleak.show.numbers import estimate

SIZE = {"length": 256, "prompts": 16}
if os.environ.get("POSLEAK_LEAN") == "1":  # tests run this page with less
    SIZE = {"length": 128, "prompts": 8}

subject = pl.load("smollm2-135m")  # or a hub id, a folder, a .gguf file
print(subject.identity.short())

# %% [markdown]
# ## Where is position read?
#
# `measure` runs the model over random tokens, so that content cannot look like position. In every head it compares
# queries early in the prompt with late ones at equal offsets. The difference of their log-attention is the leakage, in
# nats; its power, in nats², weighted by the attention of late queries, is split into three parts:
#
# - **mask**: early queries see fewer keys, so each key gets more;
# - **drift**: attention is spread over the text differently;
# - **sink**: a different share of it goes to the first four tokens.
#
# Shares of the three add up to 100%.

# %%
run = pl.measure(subject, seed=0, **SIZE)
whole = run.summary.model["all"]
print(f"leakage: {estimate(whole.power['total'])} nats², n = {run.prompts} prompts")
for part in ("mask", "drift", "sink"):
    print(f"{part}: {estimate(whole.share[part], 'share')} of it")
print(f"the parts add up, to {run.remainder:.0e} nats")

# %% [markdown]
# The brackets are 95% intervals over prompts. A share can be negative: then that part cancels some of the others. An
# interval that contains 0 means that these prompts cannot tell; more prompts make it narrower. In the picture below
# a part's own power can be larger than the total, where parts cancel each other.
#
# The same by layer, as a picture. Bands are the intervals.

# %%
run.plot()

# %% [markdown]
# ## Where does it come from?
#
# What a layer reads may have been written by an earlier one. `trace` reads the prompt again, in three branches after
# another document. Queries that also attend to keys of that document see equally many keys, so that they cannot infer
# their position by counting. The leakage that disappears is caused by causal masks.
#
# - **here**: this layer's own mask;
# - **earlier**: masks of earlier layers, carried by the residual stream;
# - **origin**: the distance to position 0;
# - **left**: what remains, a check.

# %%
trace = pl.trace(subject, seed=0, **SIZE)
for source in ("earlier", "here", "origin", "left"):
    print(f"{source}: {estimate(trace.model['all'].share[source], 'share')}")
print(*trace.checks, sep="; ")

# %%
trace.plot()

# %% [markdown]
# ## Which heads?
#
# `run.heads` is a pandas table with a row for each head, those that leak most first. Some rank high by chance: look at
# the intervals. `sink_attention` is what late queries of the head give to position 0.

# %%
shown = ["layer", "head", "total", "total_low", "total_high", "sink_attention"]
run.heads.head(5)[shown].round(3)

# %% [markdown]
# One head's leakage by position of the query, as a labelled array ([`pl.split`](../api.md)):

# %%
top = run.heads.iloc[0]
curve = pl.split(run).sel(component="total", layer=int(top.layer), head=int(top["head"]))
curve = curve.mean("offset")
for query in curve["query"].values[:: max(1, curve.sizes["query"] // 6)]:
    print(f"query {int(query):3d}: {float(curve.sel(query=query)):+.2f} nats")

# %% [markdown]
# Is it the doing of position 0 that this head reads? An edit that hides position 0 from this head alone would tell:
# `pl.measure(subject, edits=f"sink=cut@{layer}.{head}", **SIZE)` ([edits](../edits.md)).
#
# ## For the paper
#
# PDF, SVG or PNG, by the name of the file. `save` keeps everything with its hashes; whoever has the folder can load it
# with `pl.Run.load`, draw the [page](../howto/page.md) from it, and check that nothing was changed.

# %%
trace.plot().save("figure.pdf")
run.save("smollm2")
print(run.record.caption.replace("; ", "\n"))

# %% [markdown]
# That belongs into the caption. [Citing](../howto/citing.md) has the rest.
