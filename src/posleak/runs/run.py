"""A run: the result of a measurement, with all that describes it, in memory or on disk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xarray as xr

from posleak.errors import RunError
from posleak.files import sha256_of, write_atomically
from posleak.leakage import Summary, assemble, component, components, summarise, tidy
from posleak.leakage.summary import Numbers, Products
from posleak.show.notebook import compact_html
from posleak.typed import plain

from .folder import HEADS, RESULTS, batch_path, read_batch, verify_file
from .record import Record, read_record


@dataclass(frozen=True)
class Run:
    """`record` is run.json, `data` the labelled per-prompt arrays, `path` the folder (None: only in memory)."""

    record: Record
    data: xr.Dataset
    path: Path | None = None

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """Read a finished run, checking every file against the sha256 in run.json."""
        folder = Path(path)
        record = read_record(folder)
        if record.finished is None:
            raise _unfinished(folder, record)
        for name in (RESULTS, HEADS):
            verify_file(folder, name, record.files.get(name))
        with xr.open_dataset(folder / RESULTS, engine="h5netcdf") as data:
            return cls(record, data.load(), folder)

    @classmethod
    def load_partial(cls, path: str | Path) -> Run:
        """Read a run, finished or not; of an unfinished one the batches that are there, if they have two prompts."""
        folder = Path(path)
        record = read_record(folder)
        if record.finished is not None:
            return cls.load(folder)
        done = [chunk for at in record.spec.batches() if (chunk := read_batch(folder, at)) is not None]
        if sum(len(chunk["mask"]) for chunk in done) < 2:
            raise _unfinished(folder, record)
        return cls(record, assemble(done, record.plan, record.calibration.numbers), folder)

    def under(self, record: Record) -> Run:
        """The same data under another record; numbers that were computed are kept."""
        run = Run(record, self.data, self.path)
        run.__dict__.update({name: value for name, value in self.__dict__.items() if name in ("products", "summary")})
        return run

    @property
    def name(self) -> str:
        """The model's name."""
        return self.record.identity.name

    @property
    def prompts(self) -> int:
        """How many prompts were measured; fewer than were asked for in an unfinished run."""
        return int(self.data.sizes["prompt"])

    @property
    def remainder(self) -> float:
        """The largest |sum of the parts − total| of any query and offset, in nats."""
        return float(self.data.attrs["remainder"])

    @cached_property
    def products(self) -> dict[str, Products]:
        """Products of prompts, of early and of all queries: what all numbers are computed from."""
        return Products.by_queries({name: component(self.data, name) for name in components(self.data)})

    @cached_property
    def summary(self) -> Summary:
        """All numbers with intervals."""
        return summarise(self.data, self.products)

    def parts(self) -> xr.DataArray:
        """Mean over prompts of every component: (component, layer, head, query, offset), in nats."""
        names = components(self.data)
        arrays = [component(self.data, name).mean("prompt") for name in names]
        return xr.concat(arrays, dim=xr.IndexVariable("component", list(names))).rename("leakage")

    def _repr_html_(self) -> str:
        """In a notebook: shares with intervals, compactly."""
        return compact_html(self.name, self.record.facts, self.summary.model)

    def as_dict(self) -> dict[str, Any]:
        """The JSON contract of `posleak measure --json` (docs/json.md)."""
        record, summary = self.record, self.summary
        found: dict[str, Any] = plain(
            {
                "model": self.name, "identity": record.identity, "inputs": record.inputs, "length": record.spec.length,
                "prompts": record.spec.prompts, "seed": record.spec.seed, "edits": record.spec.edits,
                "touched": record.touched, "definitions": record.definitions_version, "origin": record.plan.origin,
                "motion": record.motion, "remainder": self.remainder, "calibration": record.calibration,
                "layers": [_layer(summary, layer) for layer in range(self.data.sizes["layer"])],
                "early": _numbers(summary.model["early"]), "all": _numbers(summary.model["all"]),
                "units": {"power": "nats²", "share": "1", "remainder": "nats", "sink_attention": "1"},
                "warnings": record.warnings, "run": None if self.path is None else str(self.path),
            }
        )  # fmt: skip
        return found

    def write_results(self, folder: Path) -> dict[str, str]:
        """Write results.nc and heads.parquet; returns their sha256 by name."""
        table = pa.Table.from_pylist(list(tidy(self.summary)))
        encoding = {name: {"zlib": True, "complevel": 4} for name in self.data.data_vars}
        netcdf = self.data.to_netcdf(engine="h5netcdf", encoding=encoding)
        write_atomically(folder / RESULTS, lambda path: path.write_bytes(netcdf))
        write_atomically(folder / HEADS, lambda path: pq.write_table(table, path, compression="zstd"))
        return {name: sha256_of(folder / name) for name in (RESULTS, HEADS)}


def _unfinished(folder: Path, record: Record) -> RunError:
    done = sum(len(at) for at in record.spec.batches() if batch_path(folder, at).exists())
    return RunError(
        "the run is not finished", where=str(folder), got=f"{done} of {record.spec.prompts} prompts",
        remedy="start the same `posleak measure` again: it resumes",
    )  # fmt: skip


def _layer(summary: Summary, layer: int) -> dict[str, Any]:
    powers = {name: power[layer] for name, power in summary.layers["all"].power.items()}
    cells = {**powers, "sink_attention": summary.layer_sink_attention[layer]}
    values = {name: cell.value for name, cell in cells.items()}
    shares = {name: share[layer].value for name, share in summary.layers["all"].share.items()}
    profile = summary.layer_profile[layer]
    return {
        "layer": summary.numbers[layer], "call": layer, **values,
        "ci": {name: [cell.low, cell.high] for name, cell in cells.items()}, "share": shares,
        "profile": profile, "ordinary": summary.layer_ordinary[layer], "sink_width": summary.width[layer],
    }  # fmt: skip


def _numbers(numbers: Numbers) -> dict[str, Any]:
    return {"power": numbers.power, "share": numbers.share, "stabilisation": numbers.stabilisation}


def split(run: Run) -> xr.DataArray:
    """Labelled components of a run, mean over prompts: (component, layer, head, query, offset), in nats."""
    return run.parts()
