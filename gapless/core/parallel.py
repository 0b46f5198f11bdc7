"""How a model's sizes divide over tensor-parallel ranks.

Every rank keeps `1 / world_size` of the attention heads, of the linear layers' key heads with
their value heads, and of each feed-forward block's and each expert's intermediate features.
Embedding, router, norms and latents with the projections to them are whole on each rank; of a
Mamba-2 layer's norm, whose rows are the key heads' channels, and of norms over all heads, each
keeps its share. With fewer KV heads than ranks, neighbouring ranks keep the same KV head. The
vocabulary head is split by rows, the last ranks' padded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from gapless.core.architecture import Architecture, LayerSpec, MixerSpec, ParallelSpec
from gapless.core.specs.attention import AttentionSpec, LatentSpec, PagedSpec
from gapless.core.specs.feed_forward import BlockSpec, GroupedMoeSpec, MlpSpec, MoeSpec
from gapless.core.specs.linear import KdaSpec, LightningSpec, LinearSpec, ShortConvSpec, SsmSpec
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

Linear = TypeVar("Linear", bound=LinearSpec)


def attention_of_rank(spec: AttentionSpec, world_size: int) -> AttentionSpec:
    """Sizes of one rank's part of an attention layer."""
    return replace(
        spec,
        num_heads=spec.num_heads // world_size,
        num_kv_heads=max(1, spec.num_kv_heads // world_size),
    )


def latent_of_rank(spec: LatentSpec, world_size: int) -> LatentSpec:
    """Sizes of one rank's part of a latent-attention layer; the latents are whole on each."""
    return replace(spec, num_heads=spec.num_heads // world_size)


def linear_of_rank(spec: Linear, world_size: int) -> Linear:
    """Sizes of one rank's part of a linear-attention layer."""
    if isinstance(spec, ShortConvSpec):
        return replace(spec, num_channels=spec.num_channels // world_size)
    return replace(
        spec,
        num_key_heads=spec.num_key_heads // world_size,
        num_value_heads=spec.num_value_heads // world_size,
    )


def layer_of_rank(spec: LayerSpec, world_size: int) -> LayerSpec:
    """Sizes of one rank's part of a layer."""
    return replace(
        spec,
        mixer=None if spec.mixer is None else _mixer_of_rank(spec.mixer, world_size),
        mlp=None if spec.mlp is None else _block_of_rank(spec.mlp, world_size),
    )


def _mixer_of_rank(spec: MixerSpec, world_size: int) -> MixerSpec:
    match spec:
        case AttentionSpec():
            return attention_of_rank(spec, world_size)
        case LatentSpec():
            return latent_of_rank(spec, world_size)
        case LinearSpec():
            return linear_of_rank(spec, world_size)
        case ParallelSpec(ssm, attention):
            return ParallelSpec(
                linear_of_rank(ssm, world_size), attention_of_rank(attention, world_size)
            )


def _block_of_rank(spec: BlockSpec, world_size: int) -> BlockSpec:
    size = spec.intermediate_size // world_size
    if isinstance(spec, MoeSpec):
        return replace(spec, intermediate_size=size, shared_size=spec.shared_size // world_size)
    return replace(spec, intermediate_size=size)


def architecture_of_rank(spec: Architecture, world_size: int) -> Architecture:
    """Sizes of one rank's part of a model; its embedding and head are given whole."""
    own = spec.own_mtp_layer
    return replace(
        spec,
        layers=tuple(layer_of_rank(layer, world_size) for layer in spec.layers),
        own_mtp_layer=None if own is None else layer_of_rank(own, world_size),
    )


def head_rows(vocab_size: int, world_size: int) -> int:
    """Rows of the vocabulary head on each rank, padding included."""
    return -(-vocab_size // world_size)


def check_world_size(spec: Architecture, world_size: int) -> None:
    """Check that a model divides over `world_size` ranks.

    Raises:
        ConfigError: it does not; every size in the way is named, and the numbers that would do.
    """
    wrong = list(_in_the_way(spec, world_size))
    if not wrong:
        return
    # no more ranks than there are heads of any kind
    most = max((s.num_heads for s in spec.attention_layers), default=0)
    most = max([1, most, *(s.num_key_heads for s in spec.linear_layers)])
    fitting = [str(n) for n in range(1, most + 1) if not any(_in_the_way(spec, n))]
    raise ConfigError(
        f"tp={world_size} does not divide {', '.join(wrong)} of {spec.model_type}; use tp="
        f"{' or '.join(fitting)}"
    )


def _in_the_way(spec: Architecture, world_size: int) -> Iterator[str]:
    """Sizes that do not divide, as config.json names them."""
    sizes: dict[str, int] = {}
    for layer in (*spec.layers, *([spec.own_mtp_layer] if spec.own_mtp_layer else [])):
        for part in (*layer.memories, *([layer.mlp] if layer.mlp else [])):
            sizes |= _divided(part)
    yield from (f"{name}={size}" for name, size in sizes.items() if size % world_size)
    attention = [s for s in spec.attention_layers if isinstance(s, AttentionSpec)]
    for kv_heads in sorted({s.num_kv_heads for s in attention}):
        if kv_heads % world_size and world_size % kv_heads:
            yield f"num_key_value_heads={kv_heads}, nor is it a multiple of that,"


def _divided(part: PagedSpec | LinearSpec | BlockSpec) -> dict[str, int]:
    """Sizes of a part that are split evenly."""
    match part:
        case AttentionSpec() | LatentSpec():
            return {"num_attention_heads": part.num_heads}
        case LinearSpec():
            return _divided_linear(part)
        case MoeSpec():
            own = {"moe_intermediate_size": part.intermediate_size}
            return own | _divided_shared(part)
        case MlpSpec():
            return {"intermediate_size": part.intermediate_size}


def _divided_linear(part: LinearSpec) -> dict[str, int]:
    match part:
        case SsmSpec():
            return {"mamba_n_groups": part.num_key_heads}
        case ShortConvSpec():
            return {"hidden_size": part.num_channels}
        case LightningSpec():
            return {"num_attention_heads": part.num_key_heads}
        case KdaSpec():
            return {"linear_num_heads": part.num_key_heads}
        case _:
            return {"linear_num_key_heads": part.num_key_heads}


def _divided_shared(part: MoeSpec) -> dict[str, int]:
    # that of groups is mostly a number of experts wide
    follows = isinstance(part, GroupedMoeSpec) and part.shared_size % part.intermediate_size == 0
    if follows or not part.shared_size:
        return {}
    return {"shared_expert_intermediate_size": part.shared_size}
