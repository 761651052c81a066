# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # The circuit of position: which heads write it, what carries it, who reads it
#
# For a researcher who knows from `posleak trace` that earlier layers write position, and who wants to know how. You
# find the whole circuit of a small model in seconds, check it by erasing its direction, and see what changes in a
# large one.

# %%
import posleak as pl
from posleak.show.numbers import estimate

subject = pl.load("zoo-backcopy-nope")  # ships with posleak: two layers, two heads each, no position encoding
print(subject.identity.short())

# %% [markdown]
# This model has no position encoding at all. It was trained to copy tokens backwards, a task that needs positions.
# All it can know of position comes from the causal mask.
#
# ## Where does position come from?

# %%
trace = pl.trace(subject, length=64, prompts=24)
for source in trace.sources:
    share = estimate(trace.model["all"].share[source], "share")
    print(f"{source}: {share} of the leakage, n = {trace.ordinary.prompts}")

# %% [markdown]
# Most of the leakage was written by an earlier layer, and is read from the residual stream.
#
# ## Which heads write it?
#
# `circuit` ranks all heads by integrated gradients on one half of the prompts. On the other half it tests the first
# heads by intervention: in these heads alone, every query also sees keys of another document, so that it sees equally
# many keys at every position. The leakage of later layers that disappears was caused by these heads.

# %%
circuit = pl.circuit(subject, length=64, prompts=48)
for sentence in circuit.sentences:
    print(sentence)

# %%
for row in circuit.writing.removed:
    effect = row.leading
    print(f"set of {row.k}: {estimate(effect.removed, 'share')} removed, n = {effect.removed.n}")
    print(f"    all other heads: {estimate(effect.others, 'share')}")
for writer in circuit.writing.writers:
    print(f"writer {writer.name}: {estimate(writer.alone, 'share')} alone, n = {writer.alone.n}")

# %% [markdown]
# Both heads of layer 0 write position. Neither is sufficient alone: together they remove more than the sum of their
# single shares. Heads of layer 1 cannot be writers, because no later layer reads their output.
#
# ## What carries it?
#
# Directions of the residual stream that carry position are fitted on separate prompts. The share of the positional
# variance along the first one is measured on the prompts of the trace.

# %%
carrier = circuit.carrier
for depth in range(len(carrier.dimensions)):
    share, leading = (estimate(x[depth], "share") for x in (carrier.share, carrier.leading))
    print(f"depth {depth}: {share} of the variance is positional, {leading} of that along one direction")

# %% [markdown]
# Depth 0 is the embedding: it holds no position, so that there is nothing to carry (–). Layer 0 writes position into
# the stream, mostly along one direction. The mean coefficient along this direction, at some positions:

# %%
for at in (0, 2, 5, 10, len(carrier.positions) - 1):
    print(f"position {carrier.positions[at]}: {estimate(carrier.curve[1, at])}")

# %% [markdown]
# ## Erase it
#
# If the direction carries position, erasing it must remove the leakage, and erasing a random direction must not.

# %%
for row in circuit.erasure:
    if row.random is not None:  # a control is a row of its own, too
        removed = row.earlier_removed
        print(f"{row.edit}: {estimate(removed, 'share')} of the leakage from earlier layers removed, n = {removed.n}")
        print(f"    by as many random directions: {estimate(row.random, 'share')}")

# %% [markdown]
# More random directions remove more, because this model is narrow: compare each row with its own control. The model has
# no tokenizer for text, so the loss in the last sentence of `circuit.sentences` is of random tokens, where it means
# nothing.
#
# The erasures are ordinary [edits](../edits.md), with directions that every run fits on separate prompts and
# records by their hash. So the leakage of the model without the direction is a measurement like any other:

# %%
erased = pl.measure(subject, length=64, prompts=24, edits="position=erase:1")
before, after = (run.summary.model["all"].power["total"] for run in (trace.ordinary, erased))
print(f"leakage {estimate(before)} nats² before, {estimate(after)} nats² after, n = {after.n}")
print(erased.record.touched[0].words)

# %% [markdown]
# ## A large model
#
# The same call on a pretrained model takes longer (10 minutes for SmolLM2-135M on two cores), and the answer is less
# clean:
#
# ```python
# circuit = pl.circuit("smollm2-135m", out="runs/circuit")  # an interrupted run resumes
# pl.report(circuit, "circuit.html")                        # the circuit as a drawing
# ```
#
# Check three numbers first. *others*: the share that all heads except the first k remove. If it is large, the first k
# heads do not write position alone. *random*: the share that k random heads of the same layers remove. It should be
# clearly smaller. *overlap*: the share of the first k heads that the rankings on both halves of the prompts have in
# common. If it is small, the ranking depends on the prompts. The [definitions](../definitions.md#which-heads-write-it)
# have the formulas, and the [gallery](../gallery/circuit.html) has the circuits of two real models.
