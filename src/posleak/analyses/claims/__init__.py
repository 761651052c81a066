"""Claims of papers, each with a test; one rule turns every result into a verdict.

catalogue    findings and the rule for verdicts; the registry of claims, to which plugins can add
lab          the measurements that the tests use, under many conditions
papers       the claims of each paper (posleak.papers) with their tests
examination  all claims of a paper tested on one model, with results in a folder
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
