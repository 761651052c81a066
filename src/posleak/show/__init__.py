"""Stage 12, how things look: one home for numbers as text, words, colours, and what terminal and notebook draw.

numbers    a number as text, with its interval and unit; a dash where it is not defined
words      sentences and names that several places show
colours    of components and runs, light and dark
lines      text in lines that fit the terminal
terminal   tables that fit it, cells and bars
console    a console that shows text as it is
streams    standard output and standard error that take any text
failures   what goes wrong as a message and an exit status
notebook   a measurement or a trace as a few lines of HTML
scale      how much of the numbers a picture shows
plots      figures by matplotlib, which is imported only where one is drawn

Earlier stages use it too, since a run knows how it looks in a notebook; so it imports nothing heavy.
"""
