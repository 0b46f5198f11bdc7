"""Which layer serves which description: one line per kind of mixer and of feed-forward block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gapless.core.architecture import ParallelSpec
from gapless.core.specs.attention import AttentionSpec, LatentSpec, WideNormSpec
from gapless.core.specs.feed_forward import (
    GroupedMoeSpec,
    MlpSpec,
    MoeSpec,
    SquaredReluMoeSpec,
    SquaredReluSpec,
)
from gapless.core.specs.linear import (
    KdaSpec,
    LightningSpec,
    LinearSpec,
    SeparateDeltaSpec,
    ShortConvSpec,
    SsmSpec,
)
from gapless.layers.attention import Attention
from gapless.layers.delta_net import GatedDeltaNet
from gapless.layers.grouped_moe import GroupedMlp
from gapless.layers.kda import KimiDeltaAttention
from gapless.layers.lightning import LightningAttention
from gapless.layers.mla import LatentAttention
from gapless.layers.mlp import GatedMlp, SquaredReluMlp
from gapless.layers.moe import SparseMlp
from gapless.layers.parallel_mixer import ParallelMixer
from gapless.layers.separate_delta_net import SeparateDeltaNet
from gapless.layers.short_conv import ShortConv
from gapless.layers.squared_relu_moe import SquaredReluMoe
from gapless.layers.ssm import Mamba2
from gapless.layers.wide_norm_attention import WideNormAttention

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import Tensor

    from gapless.core.architecture import MixerSpec
    from gapless.core.specs.feed_forward import BlockSpec
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


class Block(Protocol):
    """A feed-forward block."""

    def __call__(self, x: Tensor, live: Tensor | None) -> Tensor:
        """Map `[T, D]` to `[T, D]`; tokens outside of `live` [T] are routed to no expert."""
        ...

    def targets(self, prefix: str, stored_names: Collection[str]) -> dict[str, Target]:
        """Checkpoint names and where they go, see `Decoder.targets`."""
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


def _wide_norm_attention(size: int, spec: WideNormSpec, place: Placement, norm: NormStyle) -> Mixer:
    return WideNormAttention(size, spec, place, eps=norm.eps)


def _latent_attention(size: int, spec: LatentSpec, place: Placement, _: NormStyle) -> Mixer:
    return LatentAttention(size, spec, place)


def _delta_net(size: int, spec: LinearSpec, place: Placement, norm: NormStyle) -> Mixer:
    return _Unrotated(GatedDeltaNet(size, spec, place, eps=norm.eps))


def _separate_delta_net(
    size: int, spec: SeparateDeltaSpec, place: Placement, _: NormStyle
) -> Mixer:
    return _Unrotated(SeparateDeltaNet(size, spec, place))


def _kimi_delta(size: int, spec: KdaSpec, place: Placement, norm: NormStyle) -> Mixer:
    return _Unrotated(KimiDeltaAttention(size, spec, place, eps=norm.eps))


def _mamba2(size: int, spec: SsmSpec, place: Placement, norm: NormStyle) -> Mixer:
    return _Unrotated(Mamba2(size, spec, place, eps=norm.eps))


def _lightning(size: int, spec: LightningSpec, place: Placement, _: NormStyle) -> Mixer:
    return _Unrotated(LightningAttention(size, spec, place))


def _short_conv(size: int, spec: ShortConvSpec, place: Placement, _: NormStyle) -> Mixer:
    return _Unrotated(ShortConv(size, spec, place))


def _parallel(size: int, spec: ParallelSpec, place: Placement, norm: NormStyle) -> Mixer:
    attention = Attention(
        size, spec.attention, place, eps=norm.eps, is_zero_centred=norm.is_zero_centred
    )
    return ParallelMixer(Mamba2(size, spec.ssm, place, eps=norm.eps), attention, place)


# type of the description -> what its names in checkpoints begin with, how to make the layer
MIXERS: Mapping[type, tuple[str, Callable[[int, Any, Placement, NormStyle], Mixer]]] = {
    AttentionSpec: ("self_attn.", _attention),
    WideNormSpec: ("self_attn.", _wide_norm_attention),
    LatentSpec: ("self_attn.", _latent_attention),
    LinearSpec: ("linear_attn.", _delta_net),
    SeparateDeltaSpec: ("linear_attn.", _separate_delta_net),
    KdaSpec: ("self_attn.", _kimi_delta),
    SsmSpec: ("mamba.", _mamba2),
    LightningSpec: ("self_attn.", _lightning),
    ShortConvSpec: ("conv.", _short_conv),
    # each of the two has its own name
    ParallelSpec: ("", _parallel),
}

BLOCKS: Mapping[type, Callable[[int, Any, Placement], Block]] = {
    MlpSpec: GatedMlp,
    SquaredReluSpec: SquaredReluMlp,
    MoeSpec: SparseMlp,
    GroupedMoeSpec: GroupedMlp,
    SquaredReluMoeSpec: SquaredReluMoe,
}


def make_block(hidden_size: int, spec: BlockSpec, place: Placement) -> Block:
    """Make the feed-forward block that a description calls for."""
    return BLOCKS[type(spec)](hidden_size, spec, place)


def make_mixer(
    hidden_size: int, spec: MixerSpec, place: Placement, norm: NormStyle
) -> tuple[str, Mixer]:
    """Make the mixer that a description calls for, and say what its names in checkpoints begin
    with."""
    prefix, make = MIXERS[type(spec)]
    return prefix, make(hidden_size, spec, place, norm)
