"""Stage 9: can this model be measured, and are the numbers right on this machine? Checks and laws.

check      a number, the bound that it is judged by, and why it matters
passes      the forward passes that the laws share
laws       the laws of docs/definitions.md, asked of one model
explicit   where a model writes absolute position on purpose, found by watching it
doctor     all of it as one diagnosis
"""
