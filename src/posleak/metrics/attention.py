"""Meters of attention, after the softmax: sinks, rollout, reference frames, wavelets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from posleak.axes import BAND, HEAD, LAYER, SCALE, THRESHOLD

from . import graphs, spectra
from .glimpse import Glimpse, start_attention
from .meter import Arrays, Meter

FIEDLER_TOKENS = 128
"""Number of first tokens in the graph for the Fiedler value, whose cost is cubic."""


class SinkMeter(Meter):
    """α_0 of Gu et al. (2025): mean attention of the first 64 queries to position 0."""

    name = "sinks"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"sink_start": (LAYER, HEAD)}

    def look(self, seen: Glimpse) -> Arrays:
        return {"sink_start": start_attention(seen.call)[..., 0].double().mean(-1).cpu().numpy()}


class RolloutMeter(Meter):
    """Attention rollout to position 0: (A^l … A^1)_i0 of Wu et al. (2025), mean over i.

    A is averaged over heads, and over the calls of a layer that makes several. Its rows are normalised to 1, also where
    a head has a learned sink logit. The residual connection is ignored.
    """

    name = "rollout"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {"rollout": (LAYER,)}

    def __init__(self) -> None:
        self.layer: int | None = None
        self.before, self.after = torch.empty(0), torch.empty(0)
        self.calls = list[Tensor]()

    def look(self, seen: Glimpse) -> Arrays:
        attention = seen.mean_attention
        if seen.call.index == 0:
            self.layer, self.after = None, torch.zeros_like(attention[:, 0])
            self.after[:, 0] = 1
        if seen.call.layer != self.layer:
            self.layer, self.before, self.calls = seen.call.layer, self.after, []
        read = (attention @ self.before.to(attention)[..., None])[..., 0] / attention.sum(-1)
        self.calls.append(seen.sampling.spread(read))
        self.after = torch.stack([call.to(read) for call in self.calls]).mean(0)
        return {"rollout": self.after[:, 1:].double().mean(-1).cpu().numpy()}


class FrameMeter(Meter):
    """Reference frames of Ruscio et al. (2025): the graph of a layer's attention, averaged over heads.

    centralized + distributed + bidirectional + no_frame = 1; no_frame is 1 without an anchor, and 0 otherwise.
    """

    name = "frames"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "star": (LAYER, THRESHOLD), "centralisation": (LAYER, THRESHOLD), "fiedler": (LAYER,),
        "concentration": (LAYER,), "reference_tokens": (LAYER,), "kl_reduction": (LAYER,),
        "centralized": (LAYER,), "distributed": (LAYER,), "bidirectional": (LAYER,), "no_frame": (LAYER,),
        "anchors": (LAYER,),
    }  # fmt: skip
    coords: ClassVar[Mapping[str, Sequence[Any]]] = {THRESHOLD: graphs.THRESHOLDS}

    def look(self, seen: Glimpse) -> Arrays:
        mean, rows = seen.mean_attention.double().cpu().numpy(), seen.sampling.rows
        visible = seen.call.visibility.cached("seen by rows", lambda: seen.visible.cpu().numpy())
        first = start_attention(seen.call, FIEDLER_TOKENS).mean(1).double().cpu().numpy()
        frame, degrees = graphs.frame(mean, visible, rows), graphs.in_degrees(mean, rows)
        return {
            "star": graphs.star(degrees), "centralisation": graphs.centralisation(degrees),
            "fiedler": graphs.fiedler(first), "concentration": graphs.concentration(mean, rows=rows),
            "reference_tokens": graphs.reference_tokens(mean, rows).astype(np.float64),
            "kl_reduction": graphs.kl_reduction(mean, visible, rows),
            "centralized": np.nan_to_num(frame.centralized), "distributed": np.nan_to_num(frame.distributed),
            "bidirectional": np.nan_to_num(frame.bidirectional), "no_frame": (frame.anchors == 0).astype(np.float64),
            "anchors": frame.anchors.astype(np.float64),
        }  # fmt: skip


class WaveletMeter(Meter):
    """Fourier and wavelet spectra of attention by offset, after Ruscio et al. (2024)."""

    name = "wavelets"
    arrays: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "entropy_position": (LAYER, HEAD), "entropy_spectrum": (LAYER, HEAD), "selectivity": (LAYER, HEAD),
        "bands": (LAYER, HEAD, BAND), "wavelet_energy": (LAYER, HEAD, SCALE), "wavelet_entropy": (LAYER, HEAD, SCALE),
        "scale_half": (LAYER, HEAD), "scale_quarter": (LAYER, HEAD),
    }  # fmt: skip
    coords: ClassVar[Mapping[str, Sequence[Any]]] = {BAND: ("low", "middle", "high")}

    def look(self, seen: Glimpse) -> Arrays:
        profile = seen.by_offset
        if profile is None:
            return {}
        power, wavelets = spectra.power_spectrum(profile), spectra.wavelets(profile)
        return {
            "entropy_position": spectra.entropy(profile), "entropy_spectrum": spectra.entropy(power),
            "selectivity": spectra.selectivity(power), "bands": spectra.band_shares(power),
            "wavelet_energy": wavelets.energy, "wavelet_entropy": wavelets.entropy,
            "scale_half": spectra.scale_sensitivity(profile, 2), "scale_quarter": spectra.scale_sensitivity(profile, 4),
        }  # fmt: skip
