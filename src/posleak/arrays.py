"""Arrays in files: float64 arrays as nested lists in JSON (null is NaN), NumPy .npz files, netCDF files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from posleak.files import translate_read_errors

if TYPE_CHECKING:
    import xarray as xr


class _FromLists:
    """Pydantic validator that reads a number or nested lists of numbers as a float64 array; null is NaN."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(_array)


def _array(value: Any) -> NDArray[np.float64]:
    try:
        return np.array(value, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError("expected a number, or nested lists of numbers of equal length") from error


Array = Annotated[NDArray[np.float64], _FromLists]


def read_npz(file: BinaryIO, path: str | Path, remedy: str) -> dict[str, NDArray[Any]]:
    """Read all arrays of an open .npz file. Raise RunError with the path and the remedy if it is damaged."""
    with translate_read_errors(path, remedy), np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def read_netcdf(path: Path, remedy: str) -> xr.Dataset:
    """Read a netCDF file into memory. Raise RunError with the path and the remedy if it is damaged."""
    import xarray as xr

    with translate_read_errors(path, remedy), xr.open_dataset(path, engine="h5netcdf") as data:
        return data.load()
