"""Prompts: random tokens, a constant token, crops of text or prompts of the user, and the BOS policy.

All results are expectations over prompts, so prompts must be stationary: if a token were more likely early than late,
content would be mistaken for position. Therefore tokens are i.i.d. by default, crops are taken from the inside of
texts, and the token at position 0 is chosen by an explicit policy, which results record.

`prepare` checks all settings before a model runs. Prompt b of the resulting `Prompts` depends only on (seed, b).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
