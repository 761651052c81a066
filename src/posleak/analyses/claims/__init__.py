"""Stage 10, what papers say: each claim with its sentence, its test, and one rule that judges them all.

finding      an effect with its interval, the condition that it is about, and the rule of verdicts
catalogue    claims by number; a plugin adds its own
lab          one subject on the bench: runs by edit, kept and resumed
papers       the claims of each paper (posleak.papers), each beside its test
examination  every claim of a paper on one subject, into a folder
"""
