# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 3. Choosing settings with `advise`
#
# For an engineer who chooses a BOS, a window, a scaling of the rotation or a precision: what each does to leakage and to
# the next token's loss, on text like yours, without training.

# %%
import os

import posleak as pl
from posleak.show.numbers import estimate

LEAN = os.environ.get("POSLEAK_LEAN") == "1"  # the tests run this page with fewer and shorter prompts
SIZE = {"length": 64, "prompts": 6} if LEAN else {"length": 512, "prompts": 16}
advice = pl.advise("smollm2-135m", groups=["bos", "window", "rope"], edits=["sink=cut"], **SIZE)

# %% [markdown]
# Every setting was measured beside the model as it is, on the same crops of text, so that differences are paired.

# %%
for effect in advice.effects:
    leakage, loss = effect.leakage["all/total"], effect.loss["all"]
    print(f"{effect.setting.name:18} leakage {estimate(leakage)} nats²; loss {estimate(loss)} nats per token")

# %% [markdown]
# What follows from the intervals, and no more:

# %%
for sentence in advice.sentences:
    print(sentence)

# %%
advice.plot()

# %% [markdown]
# ## A control
#
# A setting that changes nothing by its own text must give exactly 0, in both.

# %%
null = pl.advise("smollm2-135m", groups=[], edits=["rope=ntk:1"], **SIZE).effects[0]
print(float(null.leakage["all/total"].value), float(null.loss["all"].value))
