"""Position 0 beside a run: origin.json, and origin.nc with the arrays that figures are drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

from posleak.arrays import read_netcdf
from posleak.files import Sealed, sha256_of, translate_read_errors, write_atomically

from .origin import Origin
from .record import OriginRecord

JSON, ARRAYS = "origin.json", "origin.nc"


@dataclass(frozen=True)
class OriginFile:
    """origin.json: the digest of the run that it stands beside, the sha256 of origin.nc, and position 0."""

    digest: str
    arrays_sha256: str
    origin: OriginRecord


ORIGIN = Sealed("posleak origin", 1, OriginFile, "delete it; `posleak claims` makes it again")


@dataclass(frozen=True)
class StoredOrigin:
    """What a folder holds about position 0."""

    digest: str
    record: OriginRecord
    arrays: xr.Dataset


def write_origin(folder: Path, digest: str, found: Origin, spell: Callable[[int], str | None]) -> None:
    """Beside the run with this digest. Arrays first: where origin.json is, both are."""
    netcdf = origin_arrays(found, spell).to_netcdf(engine="h5netcdf")
    write_atomically(folder / ARRAYS, lambda path: path.write_bytes(netcdf))
    fields = {"digest": digest, "arrays_sha256": sha256_of(folder / ARRAYS), "origin": found}
    ORIGIN.write(folder / JSON, fields)


def read_origin(folder: Path) -> StoredOrigin | None:
    """None where there is nothing about position 0."""
    if not (folder / JSON).is_file():
        return None
    file = ORIGIN.read(folder / JSON)
    remedy = f"delete it and {JSON}; `posleak claims` makes both again"
    with translate_read_errors(folder / ARRAYS, remedy):
        if (got := sha256_of(folder / ARRAYS)) != file.arrays_sha256:
            raise ValueError(f"sha256 {got}, not {file.arrays_sha256}: it was changed or damaged")
        return StoredOrigin(file.digest, file.origin, read_netcdf(folder / ARRAYS, remedy))


def origin_arrays(found: Origin, spell: Callable[[int], str | None]) -> xr.Dataset:
    """The portrait's picture with its tokens, attention to position 0 by row, and cosines of fingerprints."""
    tokens = [found.portrait.reference, *found.portrait.tokens.tolist()]
    heads = np.array(found.fingerprint.heads, dtype=np.int64).reshape(-1, 2)
    return xr.Dataset(
        {
            "picture": (("token", "depth", "component"), found.portrait.picture),
            "attention": (("call", "head", "row"), found.reading.attention.mean(0)),
            "cosine": (("reader", "token_a", "token_b"), found.fingerprint.matrices),
            "reader_head": (("reader", "which"), heads),
        },
        {
            "token": tokens,
            "spelled": ("token", [spell(token) or "" for token in tokens]),
            "row": list(found.reading.rows),
        },
    )
