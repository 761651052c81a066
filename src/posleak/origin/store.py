"""Position 0 beside a run: origin.json, and origin.nc with the arrays that figures are drawn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xarray as xr

from posleak.errors import RunError
from posleak.runs.folder import read_json, write_atomically, write_json

from .origin import Origin
from .record import OriginRecord

JSON, ARRAYS = "origin.json", "origin.nc"


@dataclass(frozen=True)
class StoredOrigin:
    """What a folder holds about position 0."""

    record: OriginRecord
    arrays: xr.Dataset


def write_origin(folder: Path, found: Origin, spell: Callable[[int], str | None]) -> None:
    """Arrays first: where origin.json is, both are."""
    netcdf = origin_arrays(found, spell).to_netcdf(engine="h5netcdf")
    write_atomically(folder / ARRAYS, lambda path: path.write_bytes(netcdf))
    write_json(folder / JSON, found)


def read_origin(folder: Path) -> StoredOrigin | None:
    """None where there is nothing about position 0."""
    if not (folder / JSON).is_file():
        return None
    record = read_json(OriginRecord, folder / JSON, remedy="`posleak claims` makes it again when it is deleted")
    try:
        with xr.open_dataset(folder / ARRAYS, engine="h5netcdf") as arrays:
            return StoredOrigin(record, arrays.load())
    except (OSError, ValueError) as error:
        raise RunError(
            f"{ARRAYS} cannot be read", where=str(folder / ARRAYS), got=str(error),
            remedy=f"delete it and {JSON}; `posleak claims` makes both again",
        ) from error  # fmt: skip


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
