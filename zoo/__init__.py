"""Small models that differ in one setting: trained, measured and compared (zoo/README.md).

corpus     training text: documentation that is on every machine with posleak
recipe     size of a model, its data and its optimiser
variants   the settings in which models differ
tokens     batches for every training step, and held-out prompts
entropy    lowest possible loss on Bigram-Backcopy
training   training of one model: resumable to the bit, with loss curve and checkpoints
jobs       training of many models
measuring  decompositions, sinks and position 0 of trained models and their checkpoints
layout     intervals over models: variants and seeds as randomised blocks
table      every variant compared with standard RoPE
verdicts   what matched models say about claims on architectures
terminal   tables for the terminal
"""
