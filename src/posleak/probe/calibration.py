"""Is the probe telling the truth about this model? Asked at every attachment, on a short input, before any long work.

calls     every module of a kind that calls the attention function does so, equally often
future    weight that the kernel itself puts on keys after the query: exactly 0
parity    the model's output under the probe against its output under its own attention
partition the rows' log Z against the log Z that the kernel itself used

The kernel's weights are read without touching it: attention is linear in the values, so values that are indicators of
chosen keys make it return its own weights on them. That works for any path, any device, fused or not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from posleak.errors import CheckError, UnsupportedError
from posleak.models.hold import exclusive, this_thread_only
from posleak.rounding import PARITY, PARTITION

from .attachment import Probe, attach
from .call import Call
from .kernel import attend
from .native import native
from .rows import check_finite


@dataclass(frozen=True)
class Calibration:
    """What was found, and by what it is judged; stored with every result.

    layers: how many attention calls a forward pass makes;  by call, numbers: its layer, as the model counts layers;
    heads: its query heads;  biases: what is added to its logits;  modules, windows;  unmeasured: other attention that
    ran
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
        """Itself, or an error that says which check failed."""
        for what, value, bound in (
            ("the attention kernel puts weight on future keys", self.future, 0.0),
            ("the model's output under the probe differs from its own attention's", self.parity, self.parity_bound),
            ("the sampled rows do not have the kernel's denominator", self.partition, self.partition_bound),
        ):
            if not value <= bound:
                raise CheckError(
                    what, where=f"{name}: calibration", got=f"{value:.3g}", expected=f"at most {bound:.3g}",
                    remedy="numbers from this model would be wrong; `posleak doctor` shows the details",
                )  # fmt: skip
        return self


@dataclass
class KernelObserver:
    """Reads the kernel's own weights on a few keys, and compares them with the rows of logits."""

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
    """The kernel's own weights: on each chosen key, and on that key and all after it together."""
    B, K, T, width = call.value.shape
    positions, X = torch.arange(T, device=keys.device)[:, None], len(keys)
    indicator = call.value.new_zeros(B, K, T, width)
    indicator[..., :X] = (positions == keys).to(indicator)
    indicator[..., X : 2 * X] = (positions >= keys).to(indicator)
    weights = attend(replace(call, value=indicator))
    return weights[..., :X], weights[..., X : 2 * X]


def partition_gap(call: Call, keys: Int[Tensor, "chosen"], weights: Float[Tensor, "B H T chosen"]) -> float:
    """max |log Z of the rows − (s_ij − log a_ij) of the kernel|, at its heaviest key, over the row's max |s|."""
    rows = torch.arange(0, call.query.shape[2], max(1, call.query.shape[2] // 16), device=call.query.device)
    s = call.logits(rows).double()
    seen = call.visibility.rows(rows)
    visible = s.masked_fill(~seen, -torch.inf)
    if call.s_aux is not None:
        visible = torch.cat([visible, call.s_aux.to(visible).view(1, -1, 1, 1).expand(*s.shape[:3], 1)], dim=-1)
    heaviest, where = weights[:, :, rows].double().max(-1, keepdim=True)
    kernel = s.gather(-1, keys[where])[..., 0] - heaviest[..., 0].log()
    # A logit of 2000, as biased keys make them, is itself rounded to 1e-4: the gap is relative to what is rounded.
    size = s.abs().masked_fill(~seen, 0).amax(-1).clamp(min=1)
    gap = (visible.logsumexp(-1) - kernel).abs() / size
    # A weight near the smallest that its dtype resolves says nothing about the denominator.
    resolved = heaviest[..., 0] > 1e-3
    return float(gap[resolved].max()) if bool(resolved.any()) else 0.0


def calibrate(model: PreTrainedModel, ids: Int[Tensor, "B T"]) -> Calibration:
    """All checks on ids; the caller decides what a failure means (`Calibration.require`)."""
    with exclusive(model):  # its own pass must be its own
        return _calibrate(model, ids)


def _calibrate(model: PreTrainedModel, ids: Int[Tensor, "B T"]) -> Calibration:
    observer = KernelObserver()
    named = str(model.config._attn_implementation)
    expected = native(model, ids)[0]
    with attach(model, [observer]) as probe, executed_modules(model) as ran:
        found = probe.forward(ids)[0]
        layers, modules, unmeasured = _account(model, probe, ran)
    return Calibration(
        length=ids.shape[1],
        layers=layers,
        numbers=observer.numbers,
        heads=observer.heads,
        biases=observer.biases,
        modules=modules,
        windows=observer.windows,
        unmeasured=unmeasured,
        learned_sinks=observer.learned_sinks,
        future=observer.future,
        parity=relative_difference(found, expected),
        parity_bound=PARITY.of(model.dtype),
        partition=observer.partition,
        partition_bound=PARTITION.of(model.dtype),
        native=named,
    )


def relative_difference(found: Float[Tensor, "*shape"], expected: Float[Tensor, "*shape"]) -> float:
    """max |found − expected| / max |expected|; two zeros agree, and NaN counts as infinite."""
    gap = (found.double() - expected.double()).abs().max()
    relative = gap / expected.double().abs().max() if float(gap) != 0 else gap
    return float(relative) if torch.isfinite(relative) else float("inf")


@contextmanager
def executed_modules(model: PreTrainedModel) -> Iterator[list[torch.nn.Module]]:
    """Every module that runs, in order."""
    ran: list[torch.nn.Module] = []
    remember = this_thread_only(lambda module, _: ran.append(module))
    handles = [module.register_forward_pre_hook(remember) for module in model.modules()]
    try:
        yield ran
    finally:
        for handle in handles:
            handle.remove()


def _account(
    model: PreTrainedModel, probe: Probe, ran: list[torch.nn.Module]
) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """Number of calls, names of their modules, and other attention modules that ran; a missing call is an error."""
    names = {id(module): name for name, module in model.named_modules()}
    made, runs = Counter(map(id, probe.modules)), Counter(map(id, ran))
    kinds = {type(module) for module in probe.modules}
    if not probe.calls:
        raise UnsupportedError(
            "the model never called the attention function: it has no attention, or not on transformers' interface",
            where=type(model).__name__,
            remedy="this family cannot be measured",
        )
    per_run = {made[key] / runs[key] for key in made}
    skipped = [names[id(m)] for m in ran if type(m) in kinds and id(m) not in made]
    if skipped or len(per_run) > 1:
        raise CheckError(
            "some attention layers ran without calling the probe, so their rows would be missing",
            where=f"{type(model).__name__}: calibration",
            got=f"{probe.calls} calls; missing: {', '.join(skipped) or 'calls per run differ between layers'}",
            expected=f"every {'/'.join(sorted(k.__name__ for k in kinds))} that runs calls it",
            remedy="check that every layer has the same attention implementation",
        )
    callers = {id(parent) for module in probe.modules for parent in _ancestors(model, module)}
    other = {
        names[id(m)]: None for m in ran
        if "attention" in type(m).__name__.lower() and type(m) not in kinds and id(m) not in callers
    }  # fmt: skip
    return probe.calls, tuple(names[id(m)] for m in probe.modules), tuple(other)


def _ancestors(model: PreTrainedModel, module: torch.nn.Module) -> list[torch.nn.Module]:
    name = next(name for name, candidate in model.named_modules() if candidate is module)
    parts = name.split(".")
    return [model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
