"""Stage 4, what if: changes to the embedding at 0, positions, visibility, denominators, and reads of position 0.

Each is a frozen value with a short text (`--edit TEXT`), says where in the equation it acts, and leaves the model as it
was. An edit that changes nothing changes no bit.
"""

from .base import NamedEdit, Site
from .parse import FORMS, parse_edit, parse_edits, require_measurable

__all__ = ["FORMS", "NamedEdit", "Site", "parse_edit", "parse_edits", "require_measurable"]
