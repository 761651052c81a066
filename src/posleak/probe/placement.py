"""Placements: the effect of positions on queries and keys, read from the model's own computation.

A token that is alone in its sequence has the same states at every position. Its queries and keys therefore show the
effect of the position id alone, in every layer:

    k_p = R(p) c        a rotation: pairs of dimensions turn by angles φ(p), the other dimensions do not change
    q_p = t_p R(p) c    t_p: a scale that depends on absolute position, as in Llama 4; 1 in most models

Two dimensions form a pair if the sum of their squares is constant over positions while each of them changes: this shows
whether halves or neighbours are paired. φ(p) is the angle by which the pair has turned since position 0. In products
with query r, key j is moved from j to j + (r − i) by φ(r) − φ(i):

    s̃_rj = scaling · Σ_pairs [ (q·k) cos(φ_r − φ_i) − (q×k) sin(φ_r − φ_i) ] + Σ_others q k,   then the soft-cap, and
           the bias of row r at the new position

The rotation is checked with another token, and at other positions. If the check fails (a norm after the rotation), or
if states differ by position before any attention (learned positions), keys cannot be moved; `stays` gives the reason.

A model that counts its tokens itself, in addition to or instead of using position ids, is given a whole prompt of one
repeated token. All states are equal there too, unless a learned sink logit or a recurrent layer makes them differ.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, no_type_check

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from posleak.rounding import CONSTANT

from .attachment import attach, takes_positions
from .call import Call
from .edit import Edit, only
from .plan import Plan
from .tracer import AttentionTracer

ABSOLUTE_STATES = "states depend on absolute position before any attention, so content and position are not separable"
CHANGED_AFTER_ROTATION = "keys are changed after their rotation by an operation such as a norm with weights"

STAYS = "stays"

MATCH = 1e-2
"""Two dimensions form a pair if the sum of their squares varies by less than this share of their own variation."""


@dataclass(frozen=True)
class Rotation:
    """Pairs of dimensions (first, second) of a key, and their angles at the plan's rows; without rotation, 0 pairs.

    frequency   angle per position; None: the angles are not proportional to the position
    """

    first: Int[Tensor, "pairs"]
    second: Int[Tensor, "pairs"]
    angles: Float64[Tensor, "P pairs"]
    width: int
    frequency: Float64[Tensor, "pairs"] | None = None
    _turns: dict[torch.dtype, Float[Tensor, "R Q twice"]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def others(self) -> Int[Tensor, "still"]:
        """The dimensions that do not turn."""
        still = torch.ones(self.width, dtype=torch.bool, device=self.first.device)
        still[self.first] = still[self.second] = False
        return still.nonzero().flatten()

    def turn_factors(self, queries: int, dtype: torch.dtype) -> Float[Tensor, "R Q twice"]:
        """Return cosines, then negative sines, of φ_r − φ_i for all references and queries; cached for all passes."""
        if dtype not in self._turns:
            by = self.angles[queries:, None] - self.angles[:queries]  # [R, Q, pairs]
            self._turns[dtype] = torch.cat([by.cos(), -by.sin()], dim=-1).to(dtype)
        return self._turns[dtype]

    def rotated(self, x: Float[Tensor, "*rows T E"], steps: Int[Tensor, "#T"]) -> Float[Tensor, "*rows T E"]:
        """Move queries or keys by numbers of positions; the angles must be proportional to the position."""
        assert self.frequency is not None
        return self.turned(x, steps[:, None] * self.frequency.to(x.device))

    def turned(self, x: Float[Tensor, "*rows E"], by: Float64[Tensor, "*#rows pairs"]) -> Float[Tensor, "*rows E"]:
        """Rotate vectors by these angles."""
        a, b, out, cos, sin = x[..., self.first], x[..., self.second], x.clone(), by.cos().to(x), by.sin().to(x)
        out[..., self.first], out[..., self.second] = a * cos - b * sin, a * sin + b * cos
        return out


@dataclass(frozen=True)
class Placement:
    """The effect of positions in one attention call.

    rotation      how keys are moved; None: they cannot be moved, and `stays` gives the reason
    gap           largest error of keys predicted by the rotation, relative to the largest key
    temperature   t_p at the plan's rows; None: queries are not scaled by position, or the scale cannot be determined
    unevenness    largest relative change of a norm between positions that no common factor t_p explains
    """

    rotation: Rotation | None
    stays: str | None = None
    gap: float = 0.0
    temperature: Float64[Tensor, "P"] | None = None
    unevenness: float = 0.0

    def differs(self, other: Placement) -> bool:
        """Return whether the effect of positions differs.

        If states depend on position before any attention, the effect on keys is unknown, and counts as different.
        """
        one, two = self.rotation, other.rotation
        if one is None or two is None:
            return one is not two or self.gap != other.gap or self.stays == ABSOLUTE_STATES
        same = torch.equal(one.first, two.first) and torch.equal(one.angles, two.angles)
        return not same or (self.temperature is None) != (other.temperature is None)

    @property
    def moves(self) -> str:
        """How origin keys are moved in this call: `rotation`, `no rotation` or `stays`."""
        if self.rotation is None:
            return STAYS
        return "rotation" if len(self.rotation.first) else "no rotation"


@dataclass(frozen=True)
class Motion:
    """How origin keys were moved, as stored in results.

    layers   by call: "rotation", "no rotation", or "stays" if keys cannot be moved;  why: the reason
    gap      largest error of a predicted key, relative to the largest key;  bound: its upper bound
    """

    layers: tuple[str, ...]
    why: str | None
    gap: float
    bound: float

    @classmethod
    def of(cls, placements: Sequence[Placement], plan: Plan, dtype: torch.dtype) -> Motion:
        """Summarise the placements of all calls."""
        moved = [placement.gap for placement in placements if placement.rotation is not None]
        why = next((placement.stays for placement in placements if placement.stays is not None), None)
        moves = tuple(placement.moves for placement in placements)
        return cls(moves, why, max(moved, default=0.0), gap_bound(plan, dtype))

    @property
    def stays(self) -> tuple[int, ...]:
        """The calls in which origin keys cannot be moved."""
        return tuple(layer for layer, how in enumerate(self.layers) if how == STAYS)


def gap_bound(plan: Plan, dtype: torch.dtype) -> float:
    """Return the upper bound of `Placement.gap`: models compute angles, position × frequency, in float32."""
    return 16 * (torch.finfo(dtype).eps + plan.length * torch.finfo(torch.float32).eps)


def check_pairs(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Return the rows (i, r) of each check of a rotation, as indices of the plan's rows."""
    Q, last = len(plan.queries), len(plan.rows) - 1
    return (0, last), (Q // 2, last), (Q - 1, Q)


def placement_positions(plan: Plan) -> tuple[int, ...]:
    """Return the positions at which tokens are evaluated: 0, the plan's rows, sources and targets of checks, and the
    powers of two, which determine the frequencies.

    A key at a source, moved by r − i, must equal the key at the target.
    """
    sources = (0, plan.origin - 1, plan.origin - 1)
    targets = (j + plan.rows[r] - plan.rows[i] for j, (i, r) in zip(sources, check_pairs(plan), strict=True))
    return (0, *plan.rows, *sources, *targets, *powers_of_two(plan.length))


def powers_of_two(length: int) -> list[int]:
    """Return 1, 2, 4, … below `length`."""
    return [2**power for power in range((length - 1).bit_length())]


def frequencies(angles: Float64[Tensor, "places pairs"], plan: Plan, bound: float) -> Float64[Tensor, "pairs"] | None:
    """Return the angle per position, from angles at the `placement_positions`; None if they are not proportional.

    The angle at position 1 determines it up to rounding, and each doubling of the position halves the error. It is
    checked at all rows of the plan.
    """
    powers = powers_of_two(plan.length)
    frequency = angles[-len(powers)].clone()
    for power, angle in zip(powers, angles[-len(powers) :], strict=True):
        miss = angle - power * frequency
        frequency += torch.atan2(miss.sin(), miss.cos()) / power
    rows = torch.tensor(plan.rows, device=angles.device)[:, None]
    miss = (angles[1 : 1 + len(plan.rows)] - rows * frequency).div(2).sin().abs()
    return frequency if not miss.numel() or 2 * float(miss.max()) <= bound else None


@dataclass
class PlacementObserver:
    """Observer that computes the placement of every call, in a pass that evaluates each token alone at each position.

    Batches are [X tokens, places], where places are the `placement_positions`. The last token is used only for checks.
    along: the places are positions of one sequence, instead of sequences of one token
    """

    plan: Plan
    tokens: int
    along: bool
    placements: list[Placement] = field(default_factory=list)

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        query, key, value = (self._by_place(x) for x in (call.query, call.key, call.value))
        rounding = CONSTANT.of(call.value.dtype)  # of states; queries and keys may have a wider dtype
        if float((value - value[:, :1]).abs().max()) > rounding * float(value.abs().max()):
            self.placements.append(Placement(None, ABSOLUTE_STATES))
            return
        rows = slice(1, 1 + len(self.plan.rows))
        of_queries, of_keys = norm_ratios(query), norm_ratios(key)
        common = of_queries.mean(0)
        deviation = max(float((of_queries - common).abs().max()), float((of_keys - 1).abs().max()))
        uneven = deviation if deviation > rounding else 0.0
        t = common[rows] if not uneven and float((common - 1).abs().max()) > rounding else None
        rotation = read_rotation(key[:-1], call.query.dtype)
        gap = self._gap(rotation, key[-1])
        moved = gap <= gap_bound(self.plan, call.value.dtype)
        frequency = frequencies(rotation.angles, self.plan, 3 * gap_bound(self.plan, call.value.dtype))
        at = replace(rotation, angles=rotation.angles[rows], frequency=frequency) if moved else None
        self.placements.append(Placement(at, None if moved else CHANGED_AFTER_ROTATION, gap, t, uneven))

    def _by_place(self, x: Float[Tensor, "B H T E"]) -> Float64[Tensor, "X places H E"]:
        x = x.double()
        if self.along:
            return x[:, :, list(placement_positions(self.plan))].transpose(1, 2)
        return x[:, :, 0].reshape(self.tokens, -1, x.shape[1], x.shape[-1])

    def _gap(self, rotation: Rotation, key: Float64[Tensor, "places K E"]) -> float:
        """Return the error of predicted keys of the check token: rows from position 0, targets from sources."""
        P, phi = len(self.plan.rows), rotation.angles[1 : 1 + len(self.plan.rows)]
        i, r = torch.tensor(check_pairs(self.plan), device=key.device).T
        sources, targets = key[1 + P : 1 + P + 2 * len(check_pairs(self.plan))].chunk(2)
        from_0 = rotation.turned(key[:1].expand(P, -1, -1), phi[:, None])
        from_sources = rotation.turned(sources, (phi[r] - phi[i])[:, None])
        predicted, actual = torch.cat([from_0, from_sources]), torch.cat([key[1 : 1 + P], targets])
        return float((predicted - actual).abs().max() / key.abs().max().clamp(min=torch.finfo(key.dtype).tiny))


def read_rotation(key: Float64[Tensor, "X places K E"], dtype: torch.dtype) -> Rotation:
    """Find the pairs of dimensions that turn, and their angles at every place relative to the first."""
    x = key.transpose(1, 2).flatten(0, 1)  # [X·K, places, E]
    x = x / x[:, :1].norm(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    turning = (x - x[:, :1]).abs().amax((0, 1)) > 4 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    squares = (x**2 - (x**2).mean(1, keepdim=True)).flatten(0, 1)  # [X·K·places, E]
    inner = squares.T @ squares
    own = inner.diagonal()
    misfit = (own[:, None] + own + 2 * inner) / (own[:, None] + own).clamp(min=torch.finfo(own.dtype).tiny)
    misfit = misfit.masked_fill(~(turning[:, None] & turning), torch.inf).fill_diagonal_(torch.inf)
    best, partner = misfit.min(-1)
    dimension = torch.arange(len(own), device=own.device)
    mutual = (partner[partner] == dimension) & (best < MATCH) & (dimension < partner)
    first, second = dimension[mutual], partner[mutual]
    if len(first):
        # These pairs show the layout (halves or neighbours), which gives all pairs. Slow pairs turn by little more than
        # rounding, so that their partner cannot be determined from their values.
        step, low = int((second - first).mode().values), int(turning.nonzero()[0])
        d = torch.arange(low, len(turning) - step, device=turning.device)
        first = d[((d - low) // step % 2 == 0) & (turning[d] | turning[d + step])]
        second = first + step
    z = torch.complex(x[..., first], x[..., second])
    return Rotation(first, second, (z * z[:, :1].conj()).sum(0).angle(), x.shape[-1])


def norm_ratios(x: Float64[Tensor, "X places H E"]) -> Float64[Tensor, "heads places"]:
    """Return ‖x_p‖ / ‖x_0‖ of every token and head, except where x_0 is 0."""
    norms = x.norm(dim=-1).transpose(1, 2).flatten(0, 1)  # [X·H, places]
    ratios = norms / norms[:, :1].clamp(min=torch.finfo(torch.float64).tiny)
    return ratios[norms[:, 0] > 0] if bool((norms[:, 0] > 0).any()) else torch.ones_like(ratios)


COUNTS = (torch.arange, torch.linspace, torch.range, torch.cumsum, Tensor.cumsum)
"""Functions with which a model can compute positions from the number of its tokens."""

NOT_POSITIONS = ("transformers.integrations.moe", "transformers.modeling_rope_utils")
"""Modules that use these functions for other purposes: routing to experts, and frequencies of dimensions."""


class PositionCounting(TorchFunctionMode):
    """Detector of positions that the model computes itself while this mode is active."""

    detected = False

    @no_type_check  # type checks in tests would appear as the caller
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COUNTS:
            frame = sys._getframe(1)
            if frame.f_code is AttentionTracer.__torch_function__.__code__ and frame.f_back is not None:
                frame = frame.f_back  # an attention tracer is active too
            caller = frame.f_globals.get("__name__", "")
            self.detected |= caller not in NOT_POSITIONS and not caller.startswith("posleak.")
        return func(*args, **(kwargs or {}))


def read_placements(
    model: PreTrainedModel, ids: Int[Tensor, "B T"], plan: Plan, edits: Sequence[Edit] = (), start: int = 0
) -> list[Placement]:
    """Return the placement of every call at the plan's rows, shifted by `start`, with all placing edits active."""
    places, placing = placement_positions(plan), [edit for edit in edits if edit.placing]
    alone: list[Placement] = []
    if takes_positions(model):
        tokens = _tokens(model, ids, 3)
        prompts = tokens.repeat_interleave(len(places))[:, None]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        for edit in placing:
            positions = edit.positions(positions)
        at = positions[0, torch.tensor(places, device=ids.device) + start].repeat(len(tokens))[:, None]
        observer = PlacementObserver(plan, len(tokens), along=False)
        installed = [only(edit, "installed") for edit in placing]
        with attach(model, [observer], installed) as probe, PositionCounting() as counting:
            probe.forward(prompts, position_ids=at)
        if not counting.detected:
            return observer.placements
        alone = observer.placements
    tokens = _tokens(model, ids, 2)
    observer = PlacementObserver(plan, len(tokens), along=True)
    with attach(model, [observer], placing) as probe:
        probe.forward(tokens[:, None].expand(-1, plan.length).contiguous())
    if not alone:
        return observer.placements
    rotary = any("inv_freq" in name for name, _ in model.named_buffers())
    return [
        # If a recurrent state makes equal tokens differ, single tokens still show the rotation, if they show one or the
        # model has none. The scale of queries cannot be determined from them.
        replace(single, temperature=None)
        if along.stays == ABSOLUTE_STATES and single.rotation and (len(single.rotation.first) or not rotary)
        else along
        for along, single in zip(observer.placements, alone, strict=True)
    ]


def _tokens(model: PreTrainedModel, ids: Int[Tensor, "B T"], count: int) -> Int[Tensor, "X"]:
    """Return `count` different tokens, of the prompt if it has enough."""
    own = list(dict.fromkeys(ids[0].flip(0).tolist()))[:count]
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    others = (token for token in range(vocabulary) if token not in own)
    return torch.tensor([*own, *(next(others) for _ in range(count - len(own)))], device=ids.device)


def moved_logits(
    call: Call, placement: Placement | None, plan: Plan, start: int = 0
) -> Float[Tensor, "B H R Q m"] | None:
    """Compute s̃_rj: the logits of references with origin keys at their offsets from each measured query.

    Return None if keys cannot be moved.
    """
    if placement is None or placement.rotation is None:
        return None
    Q, m, rotation, device = len(plan.queries), plan.origin, placement.rotation, call.query.device
    rows = torch.tensor(plan.rows, device=device)
    references = rows[Q:] + start
    wide = torch.promote_types(call.query.dtype, torch.float32)
    group = call.heads // call.key.shape[1]
    q = call.query[:, :, references].to(wide) * call.scaling  # [B, H, R, E]
    k = call.key[:, :, start : start + m].to(wide).repeat_interleave(group, dim=1)  # [B, H, m, E]
    first, second = rotation.first, rotation.second
    s = q.new_zeros(())
    if len(rotation.others):
        s = (q[..., rotation.others] @ k[..., rotation.others].transpose(-1, -2))[:, :, :, None]  # [B, H, R, 1, m]
        s = s.expand(-1, -1, -1, Q, -1)
    if len(first):
        (qa, qb), (ka, kb) = ((x[..., first], x[..., second]) for x in (q[:, :, :, None], k[:, :, None]))
        products = torch.cat([qa * ka + qb * kb, qa * kb - qb * ka], dim=-1)  # [B, H, R, m, 2 pairs]
        s = s + torch.einsum("bhrjx,rqx->bhrqj", products, rotation.turn_factors(Q, wide))
    s = call.soft_capped(s.contiguous())
    if call.bias is not None:
        new = references[:, None, None] - rows[:Q, None] + torch.arange(m, device=device)  # [R, Q, m]
        s = s + call.bias[:, :, references[:, None, None], new]
    return s
