from .bodies import Body as Body, draw as draw
from .corpus import TextCrops as TextCrops
from .given import GivenPrompts as GivenPrompts, Inputs as Inputs, read_given as read_given
from .prompts import (
    InputFacts as InputFacts,
    Prompts as Prompts,
    bos_outside_vocabulary as bos_outside_vocabulary,
    prepare as prepare,
    repeat_notes as repeat_notes,
)
from .source import (
    SOURCE_KINDS as SOURCE_KINDS,
    ConstantToken as ConstantToken,
    RandomTokens as RandomTokens,
    Source as Source,
    SourceKind as SourceKind,
    is_source_name as is_source_name,
    parse as parse,
    register as register,
    require_source as require_source,
)
from .vocabulary import FirstToken as FirstToken, Vocabulary as Vocabulary
