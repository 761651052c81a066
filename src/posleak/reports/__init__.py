"""Reports of runs: one self-contained page, comparisons, figures for print and tables.

gather      read run folders; runs that cannot be shown are refused with the reason
view        a run with everything that reports derive from it, such as the curves of its heads, each computed once
related     metrics of other papers and their rank agreement
figures     plotly figures;  metric_figures: those of metrics of other papers
page        the page of runs, and its data for the script;  collected: the page of a sweep
compare     runs and their differences, also as a terminal table, Markdown, LaTeX
tables      every number as rows;  assets: the rows as CSV and Parquet, and figures for print
terminal    tables of the commands

No claim is known by name here: the page shows all claims of a run, and those about edits in their own section.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
