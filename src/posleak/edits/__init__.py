"""Stage 4, what if: changes to the embedding at 0, positions, visibility, context, and reads of position 0.

Each is a frozen value with a short text (`--edit TEXT`), says where it acts, and leaves the model as it was. An edit
that changes nothing by its own text, such as `shift=0`, changes no bit of the result. docs/edits.md lists them all.

A text is read and refused without torch: modules here import it only inside the functions that compute.
"""

# Importing a module registers its edits, in the order of docs/edits.md.
from . import embedding, visibility, origin, context, positions, logits, precision  # noqa: F401, I001
from .base import (
    KINDS as KINDS,
    EditKind as EditKind,
    NamedEdit as NamedEdit,
    ScopedEdit as ScopedEdit,
    Site as Site,
    register as register,
)
from .parse import (
    parse_edit as parse_edit,
    parse_edits as parse_edits,
    require_measurable as require_measurable,
    require_readable as require_readable,
    unreadable as unreadable,
)
from .scope import Scope as Scope
