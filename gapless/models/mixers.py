"""Which layer serves which description: one line per kind of mixer and of feed-forward block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gapless.core.architecture import (
    AttentionSpec,
    GroupedMoeSpec,
    KdaSpec,
    LatentSpec,
    LinearSpec,
    MoeSpec,
)
from gapless.layers.attention import Attention
from gapless.layers.delta_net import GatedDeltaNet
from gapless.layers.grouped_moe import GroupedMlp
from gapless.layers.kda import KimiDeltaAttention
from gapless.layers.mla import LatentAttention
from gapless.layers.moe import SparseMlp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from gapless.core.architecture import MixerSpec
    from gapless.layers.batch import AttentionBatch, LayerMemory
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target


@dataclass(frozen=True)
class NormStyle:
    """The norms of a model."""

    eps: float
    is_zero_centred: bool
    """Whether checkpoints store `w` where `1 + w` multiplies."""


class _Weighted(Protocol):
    def targets(self, prefix: str) -> dict[str, Target]:
        """Checkpoint names and where they go."""
        ...

    def finalize(self) -> None:
        """Derive what is derived from weights, once, after loading."""
        ...


class Mixer(_Weighted, Protocol):
    """Mixes a layer's tokens over positions."""

    def __call__(
        self, x: Tensor, rotary: Tensor, memory: LayerMemory, batch: AttentionBatch
    ) -> Tensor:
        """Map `[T, D]` to `[T, D]`, reading and writing the layer's memory."""
        ...


class _Recurrent(_Weighted, Protocol):
    def __call__(self, x: Tensor, memory: LayerMemory, batch: AttentionBatch) -> Tensor: ...


class _Unrotated:
    """A mixer that knows positions by their order alone."""

    def __init__(self, mixer: _Recurrent) -> None:
        self._mixer = mixer
        self.targets, self.finalize = mixer.targets, mixer.finalize

    def __call__(
        self, x: Tensor, rotary: Tensor, memory: LayerMemory, batch: AttentionBatch
    ) -> Tensor:
        return self._mixer(x, memory, batch)


def _attention(size: int, spec: AttentionSpec, place: Placement, norm: NormStyle) -> Mixer:
    return Attention(size, spec, place, eps=norm.eps, is_zero_centred=norm.is_zero_centred)


def _latent_attention(size: int, spec: LatentSpec, place: Placement, _: NormStyle) -> Mixer:
    return LatentAttention(size, spec, place)


def _delta_net(size: int, spec: LinearSpec, place: Placement, norm: NormStyle) -> Mixer:
    return _Unrotated(GatedDeltaNet(size, spec, place, eps=norm.eps))


def _kimi_delta(size: int, spec: KdaSpec, place: Placement, norm: NormStyle) -> Mixer:
    return _Unrotated(KimiDeltaAttention(size, spec, place, eps=norm.eps))


# type of the description -> name in checkpoints, how to make the layer
MIXERS: Mapping[type, tuple[str, Callable[[int, Any, Placement, NormStyle], Mixer]]] = {
    AttentionSpec: ("self_attn", _attention),
    LatentSpec: ("self_attn", _latent_attention),
    LinearSpec: ("linear_attn", _delta_net),
    KdaSpec: ("self_attn", _kimi_delta),
}

SPARSE_BLOCKS: Mapping[type, Callable[[int, Any, Placement], SparseMlp]] = {
    MoeSpec: SparseMlp,
    GroupedMoeSpec: GroupedMlp,
}


def make_mixer(
    hidden_size: int, spec: MixerSpec, place: Placement, norm: NormStyle
) -> tuple[str, Mixer]:
    """Make the mixer that a description calls for; return its name in checkpoints and the mixer."""
    name, make = MIXERS[type(spec)]
    return name, make(hidden_size, spec, place, norm)
