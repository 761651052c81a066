"""Prompts: random tokens, a constant token, crops of text or prompts of the user, and the BOS policy.

All results are expectations over prompts, so prompts must be stationary: if a token were more likely early than late,
content would be mistaken for position. Therefore tokens are i.i.d. by default, crops are taken from the inside of
texts, and the token at position 0 is chosen by an explicit policy, which results record.

`prepare` checks all settings before a model runs. Prompt b of the resulting `Prompts` depends only on (seed, b).
"""

from posleak.inputs.bodies import Body as Body
from posleak.inputs.bos import FirstToken as FirstToken
from posleak.inputs.given import (
    GivenPrompts as GivenPrompts,
    Inputs as Inputs,
    ReadableSubject as ReadableSubject,
    read_given as read_given,
)
from posleak.inputs.prompts import (
    InputFacts as InputFacts,
    Prompts as Prompts,
    bos_outside_vocabulary as bos_outside_vocabulary,
    prepare as prepare,
)
from posleak.inputs.randomness import draw as draw
from posleak.inputs.repeats import repeat_notes as repeat_notes
from posleak.inputs.source import (
    SOURCE_KINDS as SOURCE_KINDS,
    ConstantToken as ConstantToken,
    RandomTokens as RandomTokens,
    Source as Source,
    SourceKind as SourceKind,
    TextCrops as TextCrops,
    is_source_name as is_source_name,
    parse as parse,
    register as register,
    require_source as require_source,
)
from posleak.inputs.vocabulary import Vocabulary as Vocabulary
