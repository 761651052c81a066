"""Names of models as people write them: paths, and hub ids with a revision (`org/name@revision`)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath


def looks_like_a_path(name: str) -> bool:
    return name.startswith((".", "~", os.sep)) or name.lower().endswith(".gguf") or name.count("/") > 1


def is_inside(name: str) -> bool:
    """Return whether a path that a file names is relative, and stays in the folder that it is relative to."""
    path = PurePosixPath(name.replace("\\", "/"))
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and not set(name) & set(":\0")


def with_revision(name: str) -> tuple[str, str | None]:
    """`name@revision` as its two parts; a file or folder that is called so is a name, with no revision."""
    at = [place for place, character in enumerate(name) if character == "@"]
    for place in (len(name), *reversed(at)):  # a path may have such signs of its own
        with suppress(OSError, ValueError, RuntimeError):
            if Path(name[:place]).expanduser().exists():
                return name[:place], name[place + 1 :] or None
    before, _, revision = name.partition("@")
    return (before, revision) if before and revision else (name, None)
