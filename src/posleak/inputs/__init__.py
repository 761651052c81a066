"""Stage 2, what the model reads: random tokens, one constant token, crops of text, and the BOS policy.

The expectation of every measured number is over prompts, so prompts must be stationary: if some token were likelier
early than late, content would look like position. Hence i.i.d. tokens by default, crops from the inside of texts and
never their starts, and position 0 decided by a policy that is written into the result, never by a tokenizer's habit.

`prepare` does all the checking, before any model runs; `Prompts` then gives prompt b, which depends on (seed, b) alone.
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
