"""How results look: numbers as text, sentences, colours, terminal tables, notebook views and printed figures.

Packages that measure use it too, since a run has a view for notebooks; so it imports nothing heavy.
"""
