"""A run: the results of a measurement and the record that describes them, in memory or on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import xarray as xr

from posleak.arrays import read_netcdf
from posleak.axes import HEAD, LAYER, OFFSET, PARTS, PROMPT, QUERY, SCALING
from posleak.edits import require_storable
from posleak.errors import RunError
from posleak.files import sha256_of, sole_writer, translate_read_errors, write_atomically
from posleak.leakage import Estimate, Summary, assemble, by_head, component, components, summarise, tidy
from posleak.leakage.dataset import ARRAY_AXES, Chunk, require_finite
from posleak.leakage.summary import EVEN, LEADING, Decomposition, Products
from posleak.metrics import Meters, Metrics, make_meters
from posleak.show.notebook import compact_html
from posleak.show.numbers import estimate
from posleak.signatures import checked
from posleak.text import visible
from posleak.typed import plain

from .folder import HEADS_FILE, RECORD_FILE, RESULTS_FILE, batch_path, require_unused, verify_file
from .loop import BatchStore
from .loss import LOSS, LOSS_UNIT, PREDICTED, Losses, loss_positions
from .memory import describe_prompts
from .record import Record, read_record
from .spec import MeasureSpec

if TYPE_CHECKING:
    from posleak.show.plots import Picture


@dataclass(frozen=True, repr=False)
class Run:
    """A measured run: `record` is run.json, `data` the labelled arrays per prompt, `path` the folder or None."""

    record: Record
    data: xr.Dataset
    path: Path | None = None

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """Load a finished run after checking every file against the sha256 in run.json."""
        folder = Path(path)
        record = read_record(folder)
        if record.finished is None:
            raise _unfinished(folder, record)
        for name in (RESULTS_FILE, HEADS_FILE):
            verify_file(folder, name, record.files.get(name))
        return cls(record, _results(folder / RESULTS_FILE, record), folder)

    @classmethod
    def load_partial(cls, path: str | Path) -> Run:
        """Load a run that may be unfinished, with its finished batches; these must have at least two prompts."""
        folder = Path(path)
        record = read_record(folder)
        if record.finished is not None:
            return cls.load(folder)
        store = BatchStore(folder, record.digest, record.calibration.heads)
        chunks = [chunk for batch in record.spec.batches() if (chunk := store.read(batch)) is not None]
        if sum(len(chunk["mask"]) for chunk in chunks) < 2:
            raise _unfinished(folder, record)
        meters = meters_of(record.spec)
        return cls(record, assemble_run(chunks, record.spec, record.calibration.numbers, meters), folder)

    def save(self, folder: str | Path) -> Run:
        """Write the run as `measure(out=…)` does, into a folder without a run; return the run with its new path."""
        place = Path(folder)
        require_storable(self.record.spec.edits, str(place))
        if self.record.finished is None:
            raise _unfinished(place if self.path is None else self.path, self.record)
        with sole_writer(place):
            if (place / RECORD_FILE).exists():
                raise RunError("the folder already contains a run", where=str(place), remedy="choose another folder")
            require_unused(place)
            replace(self.record, finished=None, files={}).write(place)  # killed here, it can be started again
            record = replace(self.record, files=self.write_results(place))
            record.write(place)
        return self.under(record, place)

    def under(self, record: Record, path: Path | None = None) -> Run:
        """Return the same data with another record and path; results that were computed are not computed again."""
        run = Run(record, self.data, path or self.path)
        run.__dict__.update(
            {name: value for name, value in self.__dict__.items() if name in ("products", "summary", "metrics")}
        )
        return run

    @property
    def name(self) -> str:
        """Return the model's name."""
        return self.record.identity.name

    @property
    def prompts(self) -> int:
        """Return the number of measured prompts; in an unfinished run fewer than requested."""
        return int(self.data.sizes["prompt"])

    @property
    def remainder(self) -> float:
        """Return the largest |sum of the parts − total| of any query and offset, in nats."""
        return float(self.data.attrs["remainder"])

    @cached_property
    def products(self) -> dict[str, Products]:
        """Return the products of prompts, for early and for all queries, from which all powers are computed."""
        return self.weighted_by(self)

    def weighted_by(self, baseline: Run) -> dict[str, Products]:
        """Return the products weighted by the attention of another run, as conditions are compared with a baseline."""
        parts = {name: component(self.data, name) for name in components(self.data)}
        return Products.by_queries(parts, baseline.data["weight"])

    @cached_property
    def summary(self) -> Summary:
        """Return powers, shares and attention profiles with their intervals."""
        return summarise(self.data, self.products)

    @cached_property
    def metrics(self) -> Metrics | None:
        """Return the metrics of other papers with intervals; None if the run was measured without them.

        `run.metrics.rows` is the table; `.heads`, `.layers` and `.depths` have single metrics, `.frames` the reference
        frame of every layer.
        """
        return Metrics.of(self.data)

    @cached_property
    def loss(self) -> Losses | None:
        """Return the next-token loss at the start, in the middle and at the end of the prompt; None if not measured."""
        return Losses.of(self.data, self.record.plan)

    @cached_property
    def heads(self) -> pd.DataFrame:
        """Return one row per attention call and head, sorted by total leakage: powers and attention to position 0.

        `layer` is the model's layer, and `call` the index of the call: some models have two calls in a layer.

        `total`, `mask`, … are powers in nats² over all queries, `total_low` and `total_high` the ends of the interval,
        `sink_attention` is the mean attention of late queries to position 0, and `n` the number of prompts.
        heads.parquet also has the powers over early queries. Use the intervals: among many heads, the first rows of
        `run.heads.head(10)` are partly selected by noise.
        """
        return by_head(self.summary)

    def parts(self, *, prompts: bool = False) -> xr.DataArray:
        """Return the labelled components (component, layer, head, query, offset) in nats; see `split`."""
        names, n = list(components(self.data)), self.prompts
        arrays = (component(self.data, name) for name in names)
        axis = xr.IndexVariable("component", names)
        if prompts:
            return xr.concat(list(arrays), dim=axis).rename("leakage")
        means, errors = [], []
        for x in arrays:  # one at a time: each is as large as all prompts
            means.append(x.mean(PROMPT))
            spread = x.std(PROMPT, ddof=1, skipna=False) if n > 1 else means[-1] * np.nan  # one prompt has no spread
            errors.append(spread.values / n**0.5)
        mean = xr.concat(means, dim=axis).rename("leakage")
        return mean.assign_coords(se=(mean.dims, np.stack(errors)))

    def plot(self) -> Picture:
        """Plot powers by layer with their intervals, and below them stabilisation and attention to position 0."""
        from posleak.show.plots import Picture, depth, drawn

        summary, title = self.summary, f"{self.name}, n = {self.prompts}, {self.record.spec.length} tokens"
        numbers, attention = summary.layers["all"], summary.layer_sink_attention
        parts = [name for name in (*PARTS, SCALING) if name in numbers.share]
        return Picture(drawn(lambda figure: depth(figure, numbers, attention, parts, summary.places, title)), title)

    def __repr__(self) -> str:
        return f"Run({describe_run(self)})"

    def _repr_html_(self) -> str:
        """Return a compact table of shares with intervals, for notebooks."""
        return compact_html(self.name, self.record.facts, self.summary.model)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `posleak measure --json` (docs/json.md)."""
        record, summary = self.record, self.summary
        fields: dict[str, Any] = plain(
            {
                "model": self.name, "identity": record.identity, "inputs": record.inputs, "length": record.spec.length,
                "prompts": record.spec.prompts, "seed": record.spec.seed, "norm": LEADING,
                "edits": record.spec.edit_texts,
                "touched": record.touched, "definitions": record.definitions_version, "origin": record.plan.origin,
                "motion": record.motion, "positions": record.positions, "remainder": self.remainder,
                "calibration": record.calibration,
                "layers": [_layer(summary, layer) for layer in range(self.data.sizes["layer"])],
                "early": summary.model["early"], "all": summary.model["all"],
                "units": {
                    "power": "nats²", "share": "1", "remainder": "nats", "sink_attention": "1", "loss": LOSS_UNIT,
                },
                "metrics": None if self.metrics is None else self.metrics.as_dict(), "loss": self.loss,
                "warnings": record.warnings, "changed": record.changed,
                "run": None if self.path is None else str(self.path),
            }
        )  # fmt: skip
        return fields

    def write_results(self, folder: Path) -> dict[str, str]:
        """Write results.nc and heads.parquet; return their sha256 by file name."""
        more = () if self.metrics is None else self.metrics.tidy()
        table = pa.Table.from_pylist([*tidy(self.summary), *more])
        netcdf = self.data.to_netcdf(engine="h5netcdf")  # compressing it takes three times as long and saves a fifth
        write_atomically(folder / RESULTS_FILE, lambda path: path.write_bytes(netcdf))
        write_atomically(folder / HEADS_FILE, lambda path: pq.write_table(table, path, compression="zstd"))
        return {name: sha256_of(folder / name) for name in (RESULTS_FILE, HEADS_FILE)}


def meters_of(spec: MeasureSpec) -> Meters | None:
    """Return the meters of the requested metrics; None if there are none."""
    meters = make_meters(spec.metrics, spec.plan)
    return Meters(meters, spec.origin) if meters else None


def assemble_run(
    chunks: Sequence[Chunk],
    spec: MeasureSpec,
    layer_ids: Sequence[int],
    meters: Meters | None,
    short_prompts: Mapping[str, xr.Variable] | None = None,
) -> xr.Dataset:
    """Return all prompts as one dataset, with the arrays of the meters, of short prompts, and of the loss."""
    arrays = ({} if meters is None else meters.finished(chunks)) | dict(short_prompts or {})
    labels = {} if meters is None else dict(meters.coords)
    if spec.loss:
        losses = np.concatenate([chunk[LOSS] for chunk in chunks])
        arrays[LOSS] = xr.Variable((PROMPT, PREDICTED), losses, {"units": LOSS_UNIT})
        labels[PREDICTED] = loss_positions(spec.plan)
    return assemble(chunks, spec.plan, layer_ids, arrays, labels)


def _results(path: Path, record: Record) -> xr.Dataset:
    """Read results.nc; raise a RunError if its arrays do not match the plan of the record."""
    remedy, plan, heads = "measure again with --fresh", record.plan, record.calibration.heads
    data = read_netcdf(path, remedy)
    sizes = {
        PROMPT: record.spec.prompts, LAYER: len(heads), HEAD: max(heads), QUERY: len(plan.queries),
        OFFSET: len(plan.offsets),
    }  # fmt: skip
    with translate_read_errors(path, remedy):
        for name, axes in {**ARRAY_AXES, "pairs": (LAYER, QUERY, OFFSET)}.items():
            if data[name].dims != axes:
                raise ValueError(f"{name} has the axes {data[name].dims}, not {axes}")
        if differing := {axis: data.sizes[axis] for axis, size in sizes.items() if data.sizes[axis] != size}:
            raise ValueError(f"sizes of axes are {differing}, not {sizes}")
        arrays = {str(name): array.values for name, array in data.data_vars.items()}
        require_finite(arrays | {"remainder": np.asarray(data.attrs["remainder"])}, heads, str(path), remedy)
    return data


def _unfinished(folder: Path, record: Record) -> RunError:
    done = sum(len(at) for at in record.spec.batches() if batch_path(folder, at).exists())
    return RunError(
        "the run is not finished", where=str(folder), got=f"{done} of {record.spec.prompts} prompts",
        remedy="run the same `posleak measure` again to resume it",
    )  # fmt: skip


def _layer(summary: Summary, layer: int) -> dict[str, Any]:
    numbers, profile = summary.layers["all"][layer], summary.layer_profile[layer]
    return {
        "layer": summary.layer_ids[layer], "call": layer, **flat_numbers(numbers, summary.layer_sink_attention[layer]),
        "profile": profile, "ordinary": summary.layer_ordinary[layer], "sink_width": summary.width[layer],
    }  # fmt: skip


def flat_numbers(numbers: Decomposition, sink_attention: Estimate | None = None) -> dict[str, Any]:
    """Return the powers of one layer by name, their intervals under `ci`, shares, and the same under `even`."""
    cells = numbers.power if sink_attention is None else {**numbers.power, "sink_attention": sink_attention}
    flat = {
        **{name: cell.value for name, cell in cells.items()},
        "share": {name: share.value for name, share in numbers.share.items()},
        "ci": {name: [cell.low, cell.high] for name, cell in cells.items()}
        | {"share": {name: [share.low, share.high] for name, share in numbers.share.items()}},
    }
    return flat if numbers.even is None else flat | {EVEN: flat_numbers(numbers.even)}


def describe_run(run: Run) -> str:
    """Return one line: model, prompts, total power with its interval, and folder."""
    total, spec = run.summary.model["all"].power["total"], run.record.spec
    facts = ", ".join([describe_prompts(run.prompts, spec.length), spec.inputs, *spec.edit_texts])
    place = "in memory" if run.path is None else str(run.path)
    return visible(f"{run.name}: {facts}; total {estimate(total)} nats²; {place}").replace("\n", "\\n")


@checked
def split(run: Run, *, prompts: bool = False) -> xr.DataArray:
    """Return the labelled components of a run: (component, layer, head, query, offset), in nats.

    Components are means over prompts, with their standard errors as the coordinate `se`. The square of a mean is biased
    upwards by its standard error; use `run.heads` for unbiased powers.

    run         a run that `measure` returned or `Run.load` loaded
    prompts     return every prompt, as the axis after the component, without `se`
    """
    return run.parts(prompts=prompts)
