"""Scripts that generate the pages of the documentation and check the project itself; users do not need them.

census, shrink, traits, matrix   every causal-LM family as a tiny random model: docs/families.md
cli_docs, edit_docs              docs/cli.md from the commands, docs/edits.md from the registry of edits
claims_docs, metric_docs         docs/claims.md and docs/metrics.md from the registries and stored results
robustness                       docs/robustness.md and its figure from a sweep of traces
zoo_docs, ship                   docs/zoo.md from the zoo's tables; the trained models that ship with posleak
gallery, question, pictures      docs/gallery, the figures of docs/pictures.md, screenshots
tutorials                        notebooks from the scripts in docs/tutorials
api_docs                         how docstrings become docs/api.md on the site
markdown                         Markdown tables, and replacement of the generated parts of a page
reference                        records the results of a checkout and compares two recordings to the bit
"""
