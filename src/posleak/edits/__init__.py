"""Edits: interventions on the embedding at position 0, positions, visibility, context, reads of position 0, the output
of heads, and the residual stream.

An edit is a frozen value with a short text (`--edit TEXT`). It declares where it acts and leaves the model unchanged
after the run. A control, an edit whose text specifies no change (`shift=0`), changes no bit of the result.
docs/edits.md lists all edits.

Texts are parsed without torch: modules here import it only inside the functions that compute.
"""

# Importing a module registers its edits, in the order of docs/edits.md.
from . import embedding, visibility, origin, context, direction, positions, heads, precision  # noqa: F401, I001
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
    require_storable as require_storable,
    unreadable as unreadable,
    unstorable as unstorable,
)
from .scope import Scope as Scope
