# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 1. One model, from measurement to a figure for a paper
#
# For a researcher who wants one model's numbers with error bars, and a figure: load, measure, trace, look at heads, save.

# %%
import os

import posleak as pl
from posleak.show.numbers import estimate

LEAN = os.environ.get("POSLEAK_LEAN") == "1"  # the tests run this page with fewer and shorter prompts
SIZE = {"length": 64, "prompts": 6} if LEAN else {"length": 256, "prompts": 16}
subject = pl.load("smollm2-135m")
print(subject.identity.short())

# %% [markdown]
# ## Where is position read?
#
# One pass over random tokens. The leakage of every head is split into mask, drift and sink; the parts add up, and what
# is left is printed.

# %%
run = pl.measure(subject, seed=0, **SIZE)
total = run.summary.model["all"].power["total"]
print(f"leakage: {estimate(total)} nats², n = {total.n}")
for part in ("mask", "drift", "sink"):
    print(f"{part}: {estimate(run.summary.model['all'].share[part], 'share')}")
print(f"remainder: {run.remainder:.1e} nats")

# %% [markdown]
# A share is a part's share of the leakage. It can be negative: then the part cancels some of the others. An interval that
# contains 0 means that these prompts cannot tell.

# %%
run.plot()

# %% [markdown]
# ## Where does it come from?
#
# A second pass, in which every query borrows the keys that it lacks from another document. What goes away then was the
# doing of masks: of this layer's (here), or of earlier ones (earlier).

# %%
trace = pl.trace(subject, seed=0, **SIZE)
for source in ("here", "earlier", "origin"):
    print(f"{source}: {estimate(trace.model['all'].share[source], 'share')}")

# %%
trace.plot()

# %% [markdown]
# ## Which heads?
#
# Powers of single heads, unbiased, with intervals. Those in front are there by noise as well: look at the intervals.

# %%
run.heads.head(5)[["layer", "head", "total", "total_low", "total_high", "sink_attention"]].round(3)

# %% [markdown]
# ## The figure, and what to write beside it
#
# PDF, SVG or PNG, by the name. `run.record.facts` says what was measured, in words; `run.save` keeps the run with its
# hashes, so that others can load it.

# %%
trace.plot().save("figure.pdf")
print("; ".join([*run.record.model_facts, *run.record.facts]))
