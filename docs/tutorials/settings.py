# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Choosing settings with `advise`
#
# For an engineer who chooses a BOS, a window, a scaling of the rotation or a precision: what each does to leakage and
# to the next token's loss, on your text, without training.

# %%
import os

import posleak as pl
from posleak.show.numbers import estimate

SIZE = {"length": 512, "prompts": 16}
TRIED = ["bos", "window", "rope", "scale", "dtype"]
if os.environ.get("POSLEAK_LEAN") == "1":  # tests run this page with less
    SIZE, TRIED = {"length": 64, "prompts": 6}, ["bos", "window"]

# %% [markdown]
# `advise` measures the model as it is, then once more under each setting, on the same crops of text: differences are
# paired, prompt by prompt. The text is Python's own library unless you give yours, as in
# `inputs="text:my_corpus.txt"`; losses mean most on text like what your model will read. On the command line it is
# `posleak advise smollm2-135m`.
#
# Two settings here are controls: `shift=0` changes nothing, and `sink=cut@10-29` hides position 0 from the layers after
# the tenth, which have learned to rely on it.

# %%
controls = ["shift=0", "sink=cut@10-29"]
advice = pl.advise("smollm2-135m", groups=TRIED, edits=controls, **SIZE)
base = advice.baseline
total = base.summary.model["all"].power["total"]
print(f"as it is: leakage {estimate(total)} nats², n = {base.prompts}")
print(f"as it is: loss {estimate(base.loss.numbers['all'])} nats per token")

# %% [markdown]
# ## Leakage and loss
#
# Changes, with 95% intervals; leakage in nats², loss in nats per token. A streaming cache is `window=W+sinkM`: the
# nearest W tokens and the first M. Loss is taken at sampled positions, of which more lie early in the prompt; what
# happens late in a text, the end of the prompt tells (below).

# %%
for effect in advice.effects:
    leakage, loss = effect.leakage["all", "total"], effect.loss["all"]
    print(f"{effect.setting.name:16} leakage {estimate(leakage)}")
    print(f"{'':16} loss    {estimate(loss)}")

# %%
advice.plot()

# %% [markdown]
# Below the horizontal line there is less leakage, left of the vertical one less loss. Numbers stand for settings, as
# the list says; axes are linear near 0 and logarithmic further out.
#
# ## Where in the prompt?
#
# A setting may cost nothing on average and much at one place: the first 32 tokens, the middle, or the last quarter.

# %%
for effect in advice.effects:
    for where in ("first", "middle", "end"):
        if where in effect.loss:
            print(f"{effect.setting.name:16} {where:6} {estimate(effect.loss[where])}")

# %% [markdown]
# ## What follows
#
# Sentences use wider intervals, which hold for all settings together (Bonferroni): with a dozen settings, one of the
# narrow ones would often exclude 0 by chance. "Does not change significantly" is not "does not change": the numbers
# above say how much it may be. Two settings with nearly the same numbers can be in different sentences, if the interval
# of one just ends before 0; more prompts decide.

# %%
for sentence in advice.sentences:
    print(sentence)

# %% [markdown]
# The control that changes nothing gives exactly 0, in both:

# %%
null = next(effect for effect in advice.effects if effect.setting.name == "shift=0")
print(float(null.leakage["all", "total"].value), float(null.loss["all"].value))

# %% [markdown]
# Leakage is no fault by itself. A setting that lowers it without a price is of use where a model should do the same
# everywhere: with prompts longer than those of its training, or in a streaming cache. [Edits](../edits.md) has all
# settings that can be tried; `advise --edit "window=128+sink4,rope=ntk:2"` tries two at once.
