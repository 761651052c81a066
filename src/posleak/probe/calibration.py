"""Calibration: checks at every attachment, on a short input, that the probe measures this model correctly.

calls     every module of a class that calls the attention function does so, equally often
future    weight that the kernel puts on keys after the query: exactly 0
parity    output of the model under the probe compared with its output under its own attention
partition log Z of the rows compared with the log Z that the kernel used

The kernel's weights are obtained without changing it: attention is linear in the values, so that it returns its own
weights if the values are indicators of chosen keys. This works for every implementation and device, fused or not.

`Positions` is the kind of position encoding, as observed: biases on logits, and the effect of positions on keys.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from posleak.axes import format_layers
from posleak.errors import CheckError, UnsupportedError
from posleak.models.hold import exclusive, this_thread_only
from posleak.rounding import PARITY, PARTITION

from .attachment import Probe, attach
from .call import Call, attend
from .native import native, states_of
from .placement import ABSOLUTE_STATES, STAYS, Motion
from .rows import check_finite

ROTARY, TABLE, NONE = "rotary", "table of positions", "none"


@dataclass(frozen=True)
class Calibration:
    """The results and bounds of all checks, as stored with every result.

    layers                    number of attention calls of a forward pass
    numbers, heads            by call: the index of its layer, and the number of its query heads
    biases, modules, windows  by call: the kind of bias, the name of its module, and the size of its window
    unmeasured                other attention modules that ran
    """

    length: int
    layers: int
    numbers: tuple[int, ...]
    heads: tuple[int, ...]
    biases: tuple[str | None, ...]
    modules: tuple[str, ...]
    windows: tuple[int | None, ...]
    unmeasured: tuple[str, ...]
    learned_sinks: bool
    future: float
    parity: float
    parity_bound: float
    partition: float
    partition_bound: float
    native: str

    @property
    def ok(self) -> bool:
        return self.future == 0 and self.parity <= self.parity_bound and self.partition <= self.partition_bound

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}

    def require(self, name: str) -> Calibration:
        """Return self, or raise CheckError with the first check that failed."""
        for what, value, bound in (
            ("the attention kernel puts weight on later keys", self.future, 0.0),
            ("the probe changes the output of the model", self.parity, self.parity_bound),
            ("the denominators of the sampled rows differ from the kernel's", self.partition, self.partition_bound),
        ):
            if not value <= bound:
                raise CheckError(
                    what, where=f"{name}: calibration", got=f"{value:.3g}", expected=f"at most {bound:.3g}",
                    remedy="results for this model would be wrong; `posleak doctor` shows details",
                )  # fmt: skip
        return self


@dataclass
class KernelObserver:
    """Observer that compares the kernel's weights on a few keys with rows of logits, and describes every call."""

    future: float = 0.0
    partition: float = 0.0
    windows: tuple[int | None, ...] = ()
    numbers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    biases: tuple[str | None, ...] = ()
    learned_sinks: bool = False

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        T, width = call.query.shape[2], call.value.shape[-1]
        positions = torch.arange(T, device=call.query.device)
        keys = positions[torch.unique(torch.linspace(0, T - 1, min(12, width // 2, T)).round().long())]
        try:
            check_finite(call.logits(positions[-1:]))
        except CheckError as error:
            raise error.at(f"layer {call.layer}") from error
        on, from_on = kernel_weights(call, keys)
        self.future = max(self.future, float(from_on.masked_fill(keys <= positions[:, None], 0).abs().max()))
        self.partition = max(self.partition, partition_gap(call, keys, on))
        seen = int(call.visibility.rows(positions[-1:])[0, 0, 0].sum())
        self.learned_sinks |= call.s_aux is not None
        self.windows += (None if seen == T else seen,)
        self.numbers += (call.layer,)
        self.heads += (call.heads,)
        self.biases += (call.bias_kind,)


def kernel_weights(
    call: Call, keys: Int[Tensor, "chosen"]
) -> tuple[Float[Tensor, "B H T chosen"], Float[Tensor, "B H T chosen"]]:
    """Return the kernel's weights on each chosen key, and their sums over that key and all later ones."""
    B, K, T, width = call.value.shape
    positions, X = torch.arange(T, device=keys.device)[:, None], len(keys)
    indicator = call.value.new_zeros(B, K, T, width)
    indicator[..., :X] = (positions == keys).to(indicator)
    indicator[..., X : 2 * X] = (positions >= keys).to(indicator)
    weights = attend(replace(call, value=indicator))
    return weights[..., :X], weights[..., X : 2 * X]


def partition_gap(call: Call, keys: Int[Tensor, "chosen"], weights: Float[Tensor, "B H T chosen"]) -> float:
    """Return max |log Z − (s_ij − log a_ij)| of rows and kernel at its heaviest key, relative to max |s| of a row."""
    rows = torch.arange(0, call.query.shape[2], max(1, call.query.shape[2] // 16), device=call.query.device)
    s = call.logits(rows).double()
    seen = call.visibility.rows(rows)
    visible = s.masked_fill(~seen, -torch.inf)
    if call.s_aux is not None:
        visible = torch.cat([visible, call.s_aux.to(visible).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], dim=-1)
    heaviest, where = weights[:, :, rows].double().max(-1, keepdim=True)
    kernel = s.gather(-1, keys[where])[..., 0] - heaviest[..., 0].log()
    # The gap is relative to the size of logits: a logit of 2000, which biased keys produce, is itself rounded to 1e-4.
    size = s.abs().masked_fill(~seen, 0).amax(-1).clamp(min=1)
    gap = (visible.logsumexp(-1) - kernel).abs() / size
    # Weights near the resolution of the dtype do not determine the denominator.
    resolved = heaviest[..., 0] > 1e-3
    return float(gap[resolved].max()) if bool(resolved.any()) else 0.0


def calibrate(model: PreTrainedModel, ids: Int[Tensor, "B T"]) -> Calibration:
    """Run all checks on ids. Failures are reported in the result; `Calibration.require` raises them."""
    observer = KernelObserver()
    with exclusive(model):  # the two passes must see the same model
        named = str(model.config._attn_implementation)
        expected = states_of(native(model, ids))
        ran: list[torch.nn.Module] = []
        with attach(model, [observer]) as probe, ExitStack() as hooks:
            remember = this_thread_only(lambda module, _: ran.append(module))
            for module in model.modules():
                hooks.callback(module.register_forward_pre_hook(remember).remove)
            output = states_of(probe.forward(ids))
            modules, unmeasured = _account(model, probe, ran)
        return Calibration(
            **vars(observer),
            length=ids.shape[1],
            layers=len(modules),
            modules=modules,
            unmeasured=unmeasured,
            parity=relative_difference(output, expected),
            parity_bound=PARITY.of(model.dtype),
            partition_bound=PARTITION.of(model.dtype),
            native=named,
        )


def relative_difference(output: Float[Tensor, "*shape"], expected: Float[Tensor, "*shape"]) -> float:
    """Return max |output − expected| / max |expected|: 0 if both are 0, infinite for NaN."""
    gap = (output.double() - expected.double()).abs().max()
    relative = gap / expected.double().abs().max() if float(gap) != 0 else gap
    return float(relative) if torch.isfinite(relative) else float("inf")


def _account(
    model: PreTrainedModel, probe: Probe, ran: list[torch.nn.Module]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the module names of all calls, and of other attention modules that ran. Raise if calls are missing."""
    if not probe.calls:
        raise UnsupportedError(
            "the model did not call the attention function: it has no attention, or not through transformers",
            where=type(model).__name__, remedy="this model cannot be measured",
        )  # fmt: skip
    names = {id(module): name for name, module in model.named_modules()}
    calls, runs = Counter(map(id, probe.modules)), Counter(map(id, ran))
    kinds = {type(module) for module in probe.modules}
    skipped = [names[id(module)] for module in ran if type(module) in kinds and id(module) not in calls]
    if skipped or len({calls[module] / runs[module] for module in calls}) > 1:
        raise CheckError(
            "some attention layers did not call the probe", where=f"{type(model).__name__}: calibration",
            got=f"{probe.calls} calls; missing: {', '.join(skipped) or 'calls per run differ between layers'}",
            expected=f"a call of every {'/'.join(sorted(k.__name__ for k in kinds))} that runs",
            remedy="check that all layers have the same attention implementation",
        )  # fmt: skip
    modules = tuple(names[id(module)] for module in probe.modules)
    paths = [name.split(".") for name in modules]
    callers = {".".join(path[:depth]) for path in paths for depth in range(len(path))}
    others = (m for m in ran if "attention" in type(m).__name__.lower() and type(m) not in kinds)
    return modules, tuple(dict.fromkeys(names[id(m)] for m in others if names[id(m)] not in callers))


@dataclass(frozen=True)
class Positions:
    """The position encoding. layers: its kind in every attention call;  text: a summary, `rotary, ALiBi in layer 3`"""

    layers: tuple[str, ...]
    text: str

    @classmethod
    def of(cls, motion: Motion, calibration: Calibration) -> Positions:
        """Derive the position encoding from the motion of keys and from the biases that calibration observed."""
        layers = []
        for moves, bias in zip(motion.layers, calibration.biases, strict=True):
            table = moves == STAYS and motion.why == ABSOLUTE_STATES
            rotary = moves == "rotation" or (moves == STAYS and not table)  # changed after the rotation, so not movable
            kinds = (ROTARY if rotary else None, TABLE if table else None, bias)
            layers.append(" and ".join(filter(None, kinds)) or NONE)
        (most, _), *others = Counter(layers).most_common()
        clauses = [most]
        for kind, _ in others:
            where = [layer for layer, own in zip(calibration.numbers, layers, strict=True) if own == kind]
            name = "no rotation" if kind == NONE and most == ROTARY else kind
            clauses.append(f"{name} in {format_layers(where)}")
        return cls(tuple(layers), ", ".join(clauses))
