"""origin.json as dataclasses: what `posleak origin --json` prints and a run folder keeps about position 0.

An estimate has value, low, high and n; with one number per depth the first three are lists. n counts prompts, or tokens
for the portrait and for `fingerprint.different`. null: not defined.
"""

from __future__ import annotations

from dataclasses import dataclass

from posleak.arrays import Array
from posleak.inputs import InputFacts
from posleak.leakage import Estimate
from posleak.models import Identity
from posleak.probe import Calibration
from posleak.typed import Number

from .position_probe import Decoded
from .trajectory import Dimension


@dataclass(frozen=True)
class Reference:
    """The token that the trajectory and the portrait's cosines are about."""

    token: int
    spelled: str | None
    is_bos: bool

    @property
    def name(self) -> str:
        spelled = self.spelled or f"token {self.token}"
        return f"BOS {spelled}" if self.is_bos else spelled


@dataclass(frozen=True)
class ClosureRecord:
    """Largest relative differences of the state at position 0 in context and alone; per_layer [J]."""

    worst: Number
    bound: float
    ok: bool
    per_layer: Array
    n: int


@dataclass(frozen=True)
class BodyScale:
    """Ordinary positions by depth, [J]."""

    median_entry: Array
    median_norm: Array
    alike: Array
    n: int


@dataclass(frozen=True)
class TrajectoryRecord:
    """The state at position 0 by depth, [J] (see trajectory.Trajectory)."""

    token: int
    spelled: str | None
    settles: int
    leaves: int
    jump: int
    norm: Array
    relative: Array
    step: Array
    final: Array
    middle: Array
    dimensions: tuple[tuple[Dimension, ...], ...]
    body: BodyScale


@dataclass(frozen=True)
class PortraitRecord:
    """Many first tokens by depth; norm, cosine [3, J] are quantiles (see portrait.Portrait)."""

    n: int
    reference: int
    quantiles: tuple[float, ...]
    norm: Array
    cosine: Array
    to_reference: Estimate
    among: Estimate
    resultant: Array
    top: Array
    top_share: Array
    massive_share: Array
    overlap: Array
    explained: Array


@dataclass(frozen=True)
class HeadRecord:
    """A sink-reading head."""

    layer: int
    call: int
    head: int
    at_0: Estimate
    written: Estimate
    spread: Estimate
    positional: Estimate
    along: Estimate


@dataclass(frozen=True)
class CallRecord:
    """An attention call: its heads, and how many of them read position 0."""

    call: int
    layer: int
    heads: int
    readers: Estimate
    space: str
    projection: str | None


@dataclass(frozen=True)
class ReadingRecord:
    """Who reads position 0; `readers` of `of` heads, at_0 [L, H] (see reading.Reading)."""

    epsilon: float
    space: str
    readers: Estimate
    of: int
    mean: dict[str, Estimate]
    at_0: Array
    calls: tuple[CallRecord, ...]
    heads: tuple[HeadRecord, ...]


@dataclass(frozen=True)
class Same:
    """The largest 1 − cosine between prompts with the same first token; None without a sink-reading head."""

    worst: float | None
    n: int


@dataclass(frozen=True)
class FingerprintRecord:
    """What sink-reading heads write, across first tokens (see fingerprint.Fingerprint)."""

    same: Same
    different: Estimate
    carried: Estimate
    changed: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ProbeRecord:
    """Position read off the states, by depth [J] (see position_probe.PositionProbe)."""

    chance: float
    positions: int
    groups: int
    lambdas: tuple[float, ...]
    rank: tuple[int, ...]
    cost: Estimate
    overall: Estimate
    plain: Decoded
    projected: Decoded
    control: Decoded


@dataclass(frozen=True)
class OriginRecord:
    """Position 0 of one model."""

    model: str
    identity: Identity
    inputs: InputFacts
    length: int
    prompts: int
    tokens: int
    seed: int
    level: float
    reference: Reference
    calibration: Calibration
    closure: ClosureRecord
    trajectory: TrajectoryRecord
    portrait: PortraitRecord
    reading: ReadingRecord
    fingerprint: FingerprintRecord
    position_probe: ProbeRecord | None
