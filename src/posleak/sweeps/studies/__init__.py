"""Stage 12, many measurements compared: across architectures, rotations and windows, lengths, first tokens, dtypes.

cells     named studies: a question, and the cells (measurements) that answer it
run       measures cell by cell, into run folders that are kept and reused
"""
