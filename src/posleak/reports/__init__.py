"""Stage 13, what is shown: tables, figures, one self-contained page.

gather      run folders as they are found: whole, partial, or refused with the reason; with their trace, if there is one
curves      every head's curves with intervals
view        a run as the page shows it
neighbours  what others measure, and how it agrees with the leakage
figures     plotly figures; metric_figures: those of what others measure
page        the page: templates, style, script and numbers in one file
compare     runs side by side, with differences and intervals; formats: as a terminal table, Markdown, LaTeX
assets      figures for print, and every table as CSV and Parquet

No claim is known by name here: the page shows whatever findings a run has, and those about edits in their own section.
"""
