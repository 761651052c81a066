"""Stage 6, how things look: one home for numbers as text, words, colours, and what terminal and notebook draw.

numbers    a number as text, with its interval and unit; a dash where it is not defined
words      sentences and names that several places show
colours    of components and runs, light and dark
terminal   tables, cells and bars
notebook   a measurement as a few lines of HTML

It comes before the stages that have something to show, since a run knows how it looks in a notebook; and it imports
nothing heavy, since `posleak models` has a table too.
"""
