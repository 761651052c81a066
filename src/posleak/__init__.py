"""Measure how absolute position leaks into the attention of decoder-only language models.

    import posleak as pl
    subject = pl.load("smollm2-135m")
    run = pl.measure(subject, length=512, prompts=16, seed=0)    # where position is read
    sources = pl.trace(subject)                                  # where it comes from
    pl.report([run, sources], "report.html")

Names are imported on first use, because torch is slow to import and not every use needs it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
