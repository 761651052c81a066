"""The result of `posleak origin` in a run folder: origin.json, and origin.nc with the arrays for figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

from posleak.arrays import read_netcdf
from posleak.files import Sealed, sha256_of, translate_read_errors, write_atomically

from .origin import Origin

ORIGIN_FILE, ARRAYS_FILE = "origin.json", "origin.nc"


@dataclass(frozen=True)
class OriginFile:
    """origin.json: the digest of the run in the same folder, the sha256 of origin.nc, and the result."""

    digest: str
    arrays_sha256: str
    origin: Origin


SEALED = Sealed("posleak origin", 1, OriginFile, "delete it; `posleak claims` makes it again")


@dataclass(frozen=True)
class StoredOrigin:
    """The stored result of a folder; the arrays of `record` that are not part of the JSON are empty."""

    digest: str
    record: Origin
    arrays: xr.Dataset


def write_origin(folder: Path, digest: str, origin: Origin, spell: Callable[[int], str | None]) -> None:
    """Write the result next to the run with this digest. Arrays first: if origin.json exists, both files do."""
    netcdf = origin_arrays(origin, spell).to_netcdf(engine="h5netcdf")
    write_atomically(folder / ARRAYS_FILE, lambda path: path.write_bytes(netcdf))
    SEALED.write(folder / ORIGIN_FILE, OriginFile(digest, sha256_of(folder / ARRAYS_FILE), origin))


def read_origin(folder: Path) -> StoredOrigin | None:
    """Return the stored result, or None if the folder has none."""
    if not (folder / ORIGIN_FILE).is_file():
        return None
    file = SEALED.read(folder / ORIGIN_FILE)
    remedy = f"delete it and {ORIGIN_FILE}; `posleak claims` makes both again"
    with translate_read_errors(folder / ARRAYS_FILE, remedy):
        if (got := sha256_of(folder / ARRAYS_FILE)) != file.arrays_sha256:
            raise ValueError(f"sha256 {got}, not {file.arrays_sha256}: it was changed or damaged")
        return StoredOrigin(file.digest, file.origin, read_netcdf(folder / ARRAYS_FILE, remedy))


def origin_arrays(origin: Origin, spell: Callable[[int], str | None]) -> xr.Dataset:
    """Return the portrait's picture with its tokens, attention to position 0 by row, and cosines of fingerprints."""
    tokens = [origin.portrait.reference, *origin.portrait.tokens]
    heads = [(head.call, head.head) for head in origin.fingerprint.heads]
    return xr.Dataset(
        {
            "picture": (("token", "depth", "component"), origin.portrait.picture),
            "attention": (("call", "head", "row"), origin.reading.attention.mean(0)),
            "cosine": (("reader", "token_a", "token_b"), origin.fingerprint.matrices),
            "reader_head": (("reader", "which"), np.array(heads, dtype=np.int64).reshape(-1, 2)),
        },
        {
            "token": tokens,
            "spelled": ("token", [spell(token) or "" for token in tokens]),
            "row": list(origin.reading.rows),
        },
    )
