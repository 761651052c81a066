"""Scripts that make the project's own pages; users do not need them.

census, shrink, traits   every causal-LM family as a tiny random model: docs/families.md
cli_docs, edit_docs      docs/cli.md from the commands, docs/edits.md from the registry of edits
api_docs                 how docstrings become docs/api.md on the site
metric_docs              docs/metrics.md: the table of metrics from the catalogue, results and pictures from runs
"""
