"""Change the effect of positions: `shift=K` shifts position ids, `rope=…` changes the rotation, `ring` makes it
periodic (law L6), and `scale=logn` multiplies the logits of query i by log(i + 1) / log(N) (scalable softmax)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from posleak.errors import UnsupportedError

from .base import EditKind, NamedEdit, Site, register
from .scope import Scope

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from posleak.probe import Call, Placement, Probe

FREQUENCIES_SUFFIX = "inv_freq"
RECOMPUTED_ROTATIONS = ("dynamic", "longrope")
"""Kinds of rotation that recompute their frequencies from call to call."""


@dataclass(frozen=True)
class Shift(NamedEdit):
    """Edit that adds `by` to every position id."""

    by: int

    site: ClassVar[Site] = Site.POSITIONS
    placing: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return f"shift={self.by}"

    @property
    def is_control(self) -> bool:
        return self.by == 0

    def positions(self, positions: Tensor) -> Tensor:
        return positions + self.by if self.by else positions

    def placed(self, without: Sequence[Placement], within: Sequence[Placement]) -> list[int]:
        """Return the calls in which positions have any effect: a shift changes all of them equally."""
        affected = [place.rotation is None or len(place.rotation.first) > 0 for place in within]
        return [call for call, is_affected in enumerate(affected) if is_affected and not self.is_control]

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        from posleak.probe import takes_positions

        if not takes_positions(probe.model):
            raise UnsupportedError(
                "the model takes no position ids, so a shift changes nothing", where=f"--edit {self.text}",
                remedy="measure without the shift: the model computes positions itself",
            )  # fmt: skip
        yield


@dataclass(frozen=True)
class RotationEdit(NamedEdit):
    """Edit that replaces the rotary frequencies during the run.

    With frequencies f_k = base^(−2k/d):
    ntk:S     f_k · S^(−2k/(d−2)), which is the base raised to base · S^(d/(d−2))
    linear:S  f_k / S
    yarn:S    transformers' YaRN with factor S, its temperature on cos and sin included
    base:B    B^(−2k/d)
    none      0: no rotation at all
    """

    kind: str
    number: float = 0.0

    site: ClassVar[Site] = Site.ROTATION
    placing: ClassVar[bool] = True

    @property
    def text(self) -> str:
        return f"rope={self.kind}" if self.kind == "none" else f"rope={self.kind}:{self.number:.15g}"

    @property
    def is_control(self) -> bool:
        return self.kind in ("ntk", "linear", "yarn") and self.number == 1

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        originals: list[tuple[torch.nn.Module, str, Any]] = []
        try:
            for module, buffer in rotary_buffers(probe):
                prefix = buffer.removesuffix(FREQUENCIES_SUFFIX)
                frequencies, temperature = self.frequencies(module, getattr(module, buffer), prefix.rstrip("_"))
                for name, new in ((buffer, frequencies), (f"{prefix}attention_scaling", temperature)):
                    if new is not None:
                        originals.append((module, name, getattr(module, name)))
                        setattr(module, name, new)
            yield
        finally:
            for module, name, value in reversed(originals):
                setattr(module, name, value)

    def frequencies(self, module: Any, old: Tensor, layer_type: str) -> tuple[Tensor, float | None]:
        """Return new frequencies [d/2], and a new temperature if the kind has one."""
        import torch
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        k, d = torch.arange(len(old), device=old.device), 2 * len(old)
        if self.is_control:
            return old, None
        if self.kind == "ntk":
            return old * (self.number ** (-2 * k / max(d - 2, 1))).to(old), None
        if self.kind == "linear":
            return old / self.number, None
        if self.kind == "base":
            return 1.0 / (self.number ** (2 * k.to(torch.float) / d)).to(old), None
        if self.kind == "none":
            return torch.zeros_like(old), None
        config = copy.deepcopy(module.config)
        old_parameters = config.rope_parameters[layer_type] if layer_type else config.rope_parameters
        new = {
            **old_parameters, "rope_type": "yarn", "factor": self.number,
            "original_max_position_embeddings": config.max_position_embeddings,
        }  # fmt: skip
        config.rope_parameters = {**config.rope_parameters, layer_type: new} if layer_type else new
        frequencies, temperature = ROPE_INIT_FUNCTIONS["yarn"](config, old.device, layer_type=layer_type or None)
        return frequencies.to(old), temperature


def rotary_buffers(probe: Probe) -> list[tuple[torch.nn.Module, str]]:
    """Return (module, name) of every buffer of rotary frequencies; those of one layer type have a prefix."""
    buffers = [
        (module, name)
        for module in probe.model.modules()
        for name, _ in module.named_buffers(recurse=False)
        if name.endswith(FREQUENCIES_SUFFIX) and "original" not in name
    ]
    where = type(probe.model).__name__
    if not buffers:
        raise UnsupportedError("the model has no rotary frequencies to change", where=where)
    for module, _ in buffers:
        kinds = getattr(module, "rope_type", "default")
        if any(kind in RECOMPUTED_ROTATIONS for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
            raise UnsupportedError(
                "the model recomputes its rotation from call to call, so it cannot be replaced", where=where, got=kinds
            )
    return buffers


@dataclass(frozen=True)
class Ring(NamedEdit):
    """Edit that makes positions periodic: no mask, and an integer number of turns per N positions for every frequency.

    Then only the tokens distinguish positions, and rolling the input rolls every state. In a float64 model this law
    holds to sixteen digits, since `AllDouble` keeps every computation in float64.
    """

    text = "ring"
    site: ClassVar[Site] = Site.ROTATION
    causal: ClassVar[bool] = False

    @contextmanager
    def installed(self, probe: Probe) -> Iterator[None]:
        import torch

        from .double import AllDouble

        modules = {id(module): module for module, _ in rotary_buffers(probe)}.values()
        with ExitStack() as installed:
            for module in modules:
                installed.enter_context(module.register_forward_hook(on_circle))
            if probe.model.dtype == torch.float64:
                installed.enter_context(AllDouble())
            yield

    def edit(self, call: Call) -> Call:
        return replace(call, visibility=call.visibility.with_rule("everything", everything))


def on_circle(module: torch.nn.Module, args: Any, out: Any) -> tuple[Tensor, Tensor]:
    """Return cos and sin with integer turns per N positions, in the precision of the states.

    The frequency is the angle between the first two positions, rounded to integer turns, so that position N equals
    position 0 to the last bit in any layout of the dimensions.
    """
    import torch

    if not (isinstance(out, tuple) and len(out) == 2 and not torch.is_complex(out[0])):
        raise UnsupportedError("the rotation is not a pair of cosines and sines", where=type(module).__name__)
    cos, sin = (part.double() for part in out)
    N, temperature = cos.shape[-2], torch.hypot(cos, sin)[..., :1, :]  # of position 0, where it is exact
    angle = torch.atan2(sin, cos)
    frequency = (angle[..., 1:2, :] - angle[..., :1, :]) % (2 * math.pi)
    turns = torch.round(frequency * N / (2 * math.pi)).long()
    step = (turns * torch.arange(N, device=cos.device)[:, None] % N).double() * (2 * math.pi / N)
    return (step.cos() * temperature).to(out[0]), (step.sin() * temperature).to(out[1])


def everything(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return True for every pair: the rule under which every query sees every key."""
    return (query >= 0) & (key >= 0)


@dataclass(frozen=True)
class LogScale(NamedEdit):
    """Multiply query i by log(i + 1) / log(N), so that attention does not flatten with the number of keys.

    Nakanishi 2025, with the trained factor s replaced by 1 / log N. N: `reference`, or the prompt's length if it is 0.
    """

    reference: int = 0

    site: ClassVar[Site] = Site.LOGITS

    @property
    def text(self) -> str:
        return "scale=logn" + (f":{self.reference}" if self.reference else "")

    def edit(self, call: Call) -> Call:
        length = call.query.shape[2]
        return replace(call, query=call.query * self.temperature(range(length), length).to(call.query)[:, None])

    def temperature(self, rows: Sequence[int], length: int) -> Tensor:
        """Return the factors at these rows. Query 0, which sees itself only, is not scaled."""
        import torch

        seen = torch.tensor(list(rows), dtype=torch.float64) + 1
        return torch.where(seen > 1, seen.log() / math.log(self.reference or length), 1.0)


def _make_scale(value: str, scope: Scope) -> LogScale:
    kind, colon, number = value.partition(":")
    if kind != "logn" or (colon and not (number.isdecimal() and int(number) > 1)):
        raise ValueError(value)
    return LogScale(int(number) if colon else 0)


def _make_rotation(value: str, scope: Scope) -> RotationEdit:
    kind, _, number = value.partition(":")
    if kind == "none" and not number:
        return RotationEdit("none")
    if kind not in ("ntk", "linear", "yarn", "base") or not float(number) > 0:
        raise ValueError(value)
    return RotationEdit(kind, float(number))


register(
    EditKind(
        "rope", "rope=ntk:S|linear:S|yarn:S|base:B|none",
        "the rotary frequencies of every layer. `ntk`: the base is raised as for a context S times as long. `linear`: "
        "all frequencies are divided by S. `yarn`: transformers' YaRN with factor S, including its temperature, "
        "replaces the model's own scaling. `base`: the frequencies of the base B replace the model's own. `none`: no "
        "rotation",
        "`ring`, or any second edit of the rotation; models without rotary frequencies, and those that "
        "recompute them from call to call (dynamic, longrope)", "rope=ntk:4", _make_rotation,
    )
)  # fmt: skip
register(
    EditKind(
        "shift", "shift=K",
        "position ids: K is added to each. RoPE depends on differences only, so that only rounding should change",
        "a second edit of positions; `ring`; models that take no position ids, or too few positions",
        "shift=512", lambda value, scope: Shift(int(value)),
    )
)  # fmt: skip
register(
    EditKind(
        "ring", "ring",
        "visibility and rotation: no mask, and every frequency an integer number of turns per N positions, where N is "
        "the length of the prompt. Only the tokens distinguish positions. `claims` tests law L6 with it. Leakage is "
        "not defined under it",
        "`measure`; `shift`, `rope`, `window` and `mask`; `sink`, `patch0` and `context`, which are defined for "
        "causal queries only; models without rotary frequencies, those that recompute them from call to call, and "
        "those whose rotation is not by cosines and sines", "ring", lambda value, scope: {"": Ring()}[value],
    )
)  # fmt: skip
register(
    EditKind(
        "scale", "scale=logn[:N]",
        "logits: those of the query at position i are multiplied by log(i + 1) / log(N); N is by default the length of "
        "the prompt. This is scalable softmax (Nakanishi 2025, arXiv 2501.19399) with its trained factor replaced by "
        "1 / log(N), so that a query with N keys is unchanged. The effect of the factors on leakage is reported "
        "separately as `scaling`",
        "a second edit of the logits; `context`, where queries see other numbers of keys", "scale=logn:512",
        _make_scale,
    )
)  # fmt: skip
