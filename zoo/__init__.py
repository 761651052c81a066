"""Stage 12, small models trained here that differ in one knob: what does the knob do to leakage?

corpus     real text that every machine with posleak has
recipe     how a model is made: size, data, optimiser
variants   the knobs
tokens     batches for every step, and prompts that are held out
entropy    the least loss that is possible on Bigram-Backcopy
training   one model: resumable to the bit, its loss and checkpoints kept
jobs       many models, one after the other
measuring  both splits, sinks and position 0 of trained models and their checkpoints
layout     intervals over models: variants and seeds as randomised blocks
table      the balance of every variant beside standard RoPE
verdicts   what matched models say about sentences on architectures
"""
