"""Stage 13, advice for engineers: which setting lowers which part of the leakage without training, and what it costs.

settings  the settings that are tried on a model: first token, windows, rotations, logits, dtype
effects   measures each beside the model as it is, on the same text, and says what follows from the intervals
"""
