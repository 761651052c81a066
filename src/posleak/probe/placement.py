"""What its place does to a query or a key, read off the model: how a key can be moved, and how queries are scaled.

A token that is alone in its sequence has the same states wherever it stands, so that its queries and keys show what the
position id alone does to them, in every layer:

    k_p = R(p) c        a rotation: pairs of dimensions turn by angles φ(p), and the others stay
    q_p = t_p R(p) c    t_p: a scale by absolute position, as in Llama 4; 1 in most models

A few tokens are put at the positions of interest. Two dimensions turn together if the sum of their squares stays as it
is while each of them changes: that shows whether halves or neighbours are paired, and φ(p) is the angle that they have
turned since position 0. A key j is moved from j to j + (r − i) by the angles φ(r) − φ(i), in products with the query r:

    s̃_rj = scaling · Σ_pairs [ (q·k) cos(φ_r − φ_i) − (q×k) sin(φ_r − φ_i) ] + Σ_others q k,   then soft-cap, and the
           bias that r's own row has at the new place

Another token, and places that were not read, check it. Where the check fails (a norm after the rotation), or states
differ by position before any attention (learned positions), the key cannot be moved, and `stays` says why.

A model that counts its tokens for itself, beside using position ids or instead of it, is given the whole prompt of one
token repeated, in which all states are equal too, unless a learned sink logit or a recurrent layer makes them differ.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, no_type_check

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from posleak.rounding import CONSTANT

from .attachment import attach, takes_positions
from .call import Call
from .edit import Edit
from .plan import Plan
from .tracer import AttentionTracer

ABSOLUTE_STATES = "its states depend on absolute position before any attention, so a key cannot be told from its place"
CHANGED_AFTER_ROTATION = (
    "something acts on keys after their rotation that does not turn with it, such as a norm with weights"
)

STAYS = "stays"

MATCH = 1e-2
"""Two dimensions turn together if the sum of their squares varies by less than this share of what each varies."""


@dataclass(frozen=True)
class Rotation:
    """Which dimensions of a key turn together, and by how much at the plan's rows; 0 pairs: none turns."""

    first: Int[Tensor, "pairs"]
    second: Int[Tensor, "pairs"]
    angles: Float64[Tensor, "P pairs"]
    width: int
    _turns: dict[torch.dtype, Float[Tensor, "R Q twice"]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @cached_property
    def others(self) -> Int[Tensor, "still"]:
        """Dimensions that do not turn."""
        still = torch.ones(self.width, dtype=torch.bool, device=self.first.device)
        still[self.first] = still[self.second] = False
        return still.nonzero().flatten()

    def turn(self, queries: int, dtype: torch.dtype) -> Float[Tensor, "R Q twice"]:
        """Cosines, then negative sines, of each reference's angles minus each query's; kept for all passes."""
        if dtype not in self._turns:
            by = self.angles[queries:, None] - self.angles[:queries]  # [R, Q, pairs]
            self._turns[dtype] = torch.cat([by.cos(), -by.sin()], dim=-1).to(dtype)
        return self._turns[dtype]

    def turned(self, x: Float64[Tensor, "*rows E"], by: Float64[Tensor, "*#rows pairs"]) -> Float64[Tensor, "*rows E"]:
        """Vectors turned by these angles."""
        a, b, out = x[..., self.first], x[..., self.second], x.clone()
        out[..., self.first], out[..., self.second] = a * by.cos() - b * by.sin(), a * by.sin() + b * by.cos()
        return out


@dataclass(frozen=True)
class Placement:
    """What positions do in one attention call.

    rotation      how a key is moved; None: it stays where it is, and `stays` says why
    gap           the largest error, relative to the largest key, of keys that were predicted by it
    temperature   t_p of the plan's rows; None: queries are not scaled by position, or it cannot be told
    unevenness    the largest relative difference of norms between positions of a head that no common factor explains
    """

    rotation: Rotation | None
    stays: str | None = None
    gap: float = 0.0
    temperature: Float64[Tensor, "P"] | None = None
    unevenness: float = 0.0

    def differs(self, other: Placement) -> bool:
        """Do positions do something else in the other one? Where states depend on position before any attention, what
        keys do cannot be told, and it is taken for different."""
        one, two = self.rotation, other.rotation
        if one is None or two is None:
            return one is not two or self.gap != other.gap or self.stays == ABSOLUTE_STATES
        same = torch.equal(one.first, two.first) and torch.equal(one.angles, two.angles)
        return not same or (self.temperature is None) != (other.temperature is None)

    @property
    def moves(self) -> str:
        """In a word: how the origin is moved in this call."""
        if self.rotation is None:
            return STAYS
        return "rotation" if len(self.rotation.first) else "no rotation"


@dataclass(frozen=True)
class Motion:
    """How the origin was moved, as results carry it.

    layers   by call: "rotation", "no rotation", or "stays" where it cannot be moved, and `why` says why not
    gap      the largest error of a predicted key, relative to the largest key;  bound: what it is judged by
    """

    layers: tuple[str, ...]
    why: str | None
    gap: float
    bound: float

    @classmethod
    def of(cls, placements: Sequence[Placement], plan: Plan, dtype: torch.dtype) -> Motion:
        moved = [place.gap for place in placements if place.rotation is not None]
        why = next((place.stays for place in placements if place.stays is not None), None)
        return cls(
            tuple(p.moves for p in placements), why, max(moved, default=0.0), PlacementPositions.of(plan).bound(dtype)
        )

    @property
    def stays(self) -> tuple[int, ...]:
        """Layers in which the origin cannot be moved."""
        return tuple(layer for layer, how in enumerate(self.layers) if how == STAYS)


@dataclass(frozen=True)
class PlacementPositions:
    """Positions to look at: 0, the plan's rows, and some to check with: a source moved by r − i must be its target."""

    plan: Plan
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    """(i, r) as indices of the plan's rows."""

    @classmethod
    def of(cls, plan: Plan) -> PlacementPositions:
        Q, last = len(plan.queries), len(plan.rows) - 1
        pairs = ((0, last), (Q // 2, last), (Q - 1, Q))
        sources = (0, plan.origin - 1, plan.origin - 1)
        targets = tuple(j + plan.rows[r] - plan.rows[i] for j, (i, r) in zip(sources, pairs, strict=True))
        return cls(plan, sources, targets, pairs)

    @property
    def all(self) -> tuple[int, ...]:
        return (0, *self.plan.rows, *self.sources, *self.targets)

    def bound(self, dtype: torch.dtype) -> float:
        """How far a predicted key may be off: models compute angles, position × frequency, in float32."""
        return 16 * (torch.finfo(dtype).eps + self.plan.length * torch.finfo(torch.float32).eps)


@dataclass
class PlacementObserver:
    """Placements of every call of a pass in which one token, without others, stands at each of the places.

    Tokens are the first axis [X, places]; the last of them only checks. `along`: places are positions of one sequence,
    not sequences of one token.
    """

    places: PlacementPositions
    tokens: int
    along: bool
    found: list[Placement] = field(default_factory=list)

    def observe(self, call: Call, out: Float[Tensor, "B H T Ev"]) -> None:
        query, key, value = (self._by_place(x) for x in (call.query, call.key, call.value))
        rounding = CONSTANT.of(call.value.dtype)  # that of states; queries and keys may be wider
        if float((value - value[:, :1]).abs().max()) > rounding * float(value.abs().max()):
            self.found.append(Placement(None, ABSOLUTE_STATES))
            return
        rows = slice(1, 1 + len(self.places.plan.rows))
        common, query_gap = common_factor(query)
        _, key_gap = common_factor(key, factor=False)
        uneven = gap if (gap := max(query_gap, key_gap)) > rounding else 0.0
        t = common[rows] if not uneven and float((common - 1).abs().max()) > rounding else None
        rotation = read_rotation(key[:-1], call.query.dtype)
        gap = self._gap(rotation, key[-1])
        at = replace(rotation, angles=rotation.angles[rows])
        moved = gap <= self.places.bound(call.value.dtype)
        self.found.append(Placement(at if moved else None, None if moved else CHANGED_AFTER_ROTATION, gap, t, uneven))

    def _by_place(self, x: Float[Tensor, "B H T E"]) -> Float64[Tensor, "X places H E"]:
        x = x.double()
        if self.along:
            return x[:, :, list(self.places.all)].transpose(1, 2)
        return x[:, :, 0].reshape(self.tokens, -1, x.shape[1], x.shape[-1])

    def _gap(self, rotation: Rotation, key: Float64[Tensor, "places K E"]) -> float:
        """Keys of another token: those at the rows from the one at 0, and the targets from their sources."""
        P, X = len(self.places.plan.rows), len(self.places.sources)
        phi = rotation.angles[1 : 1 + P]
        i, r = torch.tensor(self.places.pairs, device=key.device).T
        predicted = torch.cat(
            [
                rotation.turned(key[:1].expand(P, -1, -1), phi[:, None]),
                rotation.turned(key[1 + P : 1 + P + X], (phi[r] - phi[i])[:, None]),
            ]
        )
        actual = torch.cat([key[1 : 1 + P], key[1 + P + X :]])
        return float((predicted - actual).abs().max() / key.abs().max().clamp(min=torch.finfo(key.dtype).tiny))


def read_rotation(key: Float64[Tensor, "X places K E"], dtype: torch.dtype) -> Rotation:
    """Pairs of dimensions that turn, and their angles at every place since the first."""
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
    first, second = laid_out(dimension[mutual], partner[mutual], turning)
    z = torch.complex(x[..., first], x[..., second])
    return Rotation(first, second, (z * z[:, :1].conj()).sum(0).angle(), x.shape[-1])


def laid_out(
    first: Int[Tensor, "plain"], second: Int[Tensor, "plain"], turning: Bool[Tensor, "E"]
) -> tuple[Int[Tensor, "pairs"], Int[Tensor, "pairs"]]:
    """All pairs of a layout, halves or neighbours, from those that are plain to see: slow ones turn by little more than
    rounding, and find no partner by themselves."""
    if not len(first):
        return first, second
    step, low = int((second - first).mode().values), int(turning.nonzero()[0])
    d = torch.arange(low, len(turning) - step, device=turning.device)
    first = d[((d - low) // step % 2 == 0) & (turning[d] | turning[d + step])]
    return first, first + step


def common_factor(x: Float64[Tensor, "X places H E"], factor: bool = True) -> tuple[Float64[Tensor, "places"], float]:
    """The mean over heads and tokens of ‖x_p‖ / ‖x_0‖, and how far one is from it (without: from 1)."""
    norms = x.norm(dim=-1).transpose(1, 2).flatten(0, 1)  # [X·H, places]
    ratios = norms / norms[:, :1].clamp(min=torch.finfo(torch.float64).tiny)
    ratios = ratios[norms[:, 0] > 0] if bool((norms[:, 0] > 0).any()) else torch.ones_like(ratios)
    common = ratios.mean(0) if factor else torch.ones_like(ratios[0])
    return common, float((ratios - common).abs().max())


COUNTS = (torch.arange, torch.linspace, torch.range, torch.cumsum, Tensor.cumsum)
"""With what a model can make positions out of nothing but the number of its tokens."""

ELSE = ("transformers.integrations.moe", "transformers.modeling_rope_utils")
"""Count too, but not positions: tokens to send them to experts, and dimensions to make frequencies for them."""


class PositionCounting(TorchFunctionMode):
    """Does anything but posleak make positions of its own while this is on?"""

    found = False

    @no_type_check  # or the check of its types, in the tests, would be the caller that it sees
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COUNTS:
            frame = sys._getframe(1)
            if frame.f_code is AttentionTracer.__torch_function__.__code__ and frame.f_back is not None:
                frame = frame.f_back  # a watch stands between
            caller = frame.f_globals.get("__name__", "")
            self.found |= caller not in ELSE and not caller.startswith("posleak.")
        return func(*args, **(kwargs or {}))


def read_placements(
    model: PreTrainedModel, ids: Int[Tensor, "B T"], plan: Plan, edits: Sequence[Edit] = (), start: int = 0
) -> list[Placement]:
    """The placement of every call, at the plan's rows after `start`; edits that place queries and keys are in force."""
    places, placing = PlacementPositions.of(plan), [edit for edit in edits if edit.placing]
    apart: list[Placement] = []
    if takes_positions(model):
        tokens = _tokens(model, ids, 3)
        alone = tokens.repeat_interleave(len(places.all))[:, None]
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        for edit in placing:
            positions = edit.positions(positions)
        at = positions[0, torch.tensor(places.all, device=ids.device) + start].repeat(len(tokens))[:, None]
        look = PlacementObserver(places, len(tokens), along=False)
        with attach(model, [look], [_InstalledOnly(edit) for edit in placing]) as probe, PositionCounting() as counting:
            probe.forward(alone, position_ids=at)
        if not counting.found:
            return look.found
        apart = look.found
    tokens = _tokens(model, ids, 2)
    look = PlacementObserver(places, len(tokens), along=True)
    with attach(model, [look], placing) as probe:
        probe.forward(tokens[:, None].expand(-1, plan.length).contiguous())
    if not apart:
        return look.found
    rotary = any("inv_freq" in name for name, _ in model.named_buffers())
    return [_either(one, other, rotary) for one, other in zip(look.found, apart, strict=True)]


def _either(along: Placement, apart: Placement, rotary: bool) -> Placement:
    """Where a state that is carried along makes equal tokens differ, tokens in sequences of their own still show the
    rotation, if there is one to be seen or none to be missed. How queries are scaled cannot be told from them."""
    seen = apart.rotation is not None and (len(apart.rotation.first) > 0 or not rotary)
    return replace(apart, temperature=None) if along.stays == ABSOLUTE_STATES and seen else along


@dataclass(frozen=True)
class _InstalledOnly(Edit):
    """An edit that is installed, without its own position ids."""

    inner: Edit

    def installed(self, probe: Any) -> Any:
        return self.inner.installed(probe)


def _tokens(model: PreTrainedModel, ids: Int[Tensor, "B T"], count: int) -> Int[Tensor, "X"]:
    """That many different tokens, of the prompt where it has them."""
    found = list(dict.fromkeys(ids[0].flip(0).tolist()))[:count]
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    others = (token for token in range(vocabulary) if token not in found)
    return torch.tensor([*found, *(next(others) for _ in range(count - len(found)))], device=ids.device)


def moved_logits(
    call: Call, placement: Placement | None, plan: Plan, start: int = 0
) -> Float[Tensor, "B H R Q m"] | None:
    """s̃_rj: the logits of the references with the origin's keys moved to where each measured query has them.

    None: the keys stay where they are.
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
        s = s + torch.einsum("bhrjx,rqx->bhrqj", products, rotation.turn(Q, wide))
    s = call.soft_capped(s.contiguous())
    if call.bias is not None:
        new = references[:, None, None] - rows[:Q, None] + torch.arange(m, device=device)  # [R, Q, m]
        s = s + call.bias[:, :, references[:, None, None], new]
    return s
