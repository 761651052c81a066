"""Stage 2, what the model reads: random tokens, one constant token, crops of text, and the BOS policy.

The expectation of every measured number is over prompts, so prompts must be stationary: if some token were likelier
early than late, content would look like position. Hence i.i.d. tokens by default, crops from the inside of texts and
never their starts, and position 0 decided by a policy that is written into the result, never by a tokenizer's habit.

`prepare` does all the checking, before any model runs; `Prompts` then gives prompt b, which depends on (seed, b) alone.
"""

from posleak.inputs.bodies import Body
from posleak.inputs.bos import FirstToken
from posleak.inputs.given import GivenPrompts, Inputs, Readable, read_given
from posleak.inputs.prompts import InputFacts, Prompts, bos_outside, prepare
from posleak.inputs.repeats import repeat_notes
from posleak.inputs.source import (
    KINDS,
    ConstantToken,
    Kind,
    RandomTokens,
    Source,
    TextCrops,
    names_source,
    parse,
    register,
    require_source,
)
from posleak.inputs.stream import draw
from posleak.inputs.vocabulary import Vocabulary

__all__ = [
    "KINDS",
    "Body",
    "ConstantToken",
    "FirstToken",
    "GivenPrompts",
    "InputFacts",
    "Inputs",
    "Kind",
    "Prompts",
    "RandomTokens",
    "Readable",
    "Source",
    "TextCrops",
    "Vocabulary",
    "bos_outside",
    "draw",
    "names_source",
    "parse",
    "prepare",
    "read_given",
    "register",
    "repeat_notes",
    "require_source",
]
