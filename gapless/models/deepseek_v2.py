"""DeepSeek-V2: latent attention in every layer, softmax-routed experts with shared ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.config.hf.rope import yarn_mscale
from gapless.core.architecture import Architecture, LayerSpec
from gapless.core.specs.attention import LatentSpec, RotarySpec
from gapless.core.specs.feed_forward import Scoring
from gapless.errors import UnsupportedModel
from gapless.models.decoder import Decoder, head_rules
from gapless.models.feed_forward import grouped_moe, sparse_behind_dense

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.config.hf import HfConfig
    from gapless.core.specs.feed_forward import BlockSpec
    from gapless.layers.placement import Placement
    from gapless.models.loader import IgnoreRule

TOPK_METHODS = ("greedy", "group_limited_greedy")


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    method = hf.optional_string("topk_method") or "greedy"
    # codes of the model disagree about what weights are then multiplied by
    renormalises = hf.boolean("norm_topk_prob", default=False)
    if method not in TOPK_METHODS or renormalises:
        raise UnsupportedModel(
            f"{hf.path}: topk_method is {method!r}, norm_topk_prob is {renormalises}; want "
            f"{' or '.join(TOPK_METHODS)}, and false: serve another model"
        )
    sparse = grouped_moe(hf, Scoring.SOFTMAX, limits_groups=method != "greedy")
    return latent_model(hf, sparse_behind_dense(hf, sparse))


def latent_model(hf: HfConfig, mlps: Sequence[BlockSpec]) -> Architecture:
    """Describe a model with latent attention in every layer, each before its feed-forward block.

    Raises:
        UnsupportedModel: projections to or from latents have biases.
    """
    attention = latent_attention(hf)
    return Architecture(
        model_type=hf.model_type,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hf.integer("hidden_size"),
        layers=tuple(LayerSpec(attention, mlp) for mlp in mlps),
        norm_eps=hf.number("rms_norm_eps"),
        ties_embeddings=hf.ties_embeddings,
        max_position=hf.max_position_embeddings,
    )


def latent_attention(hf: HfConfig) -> LatentSpec:
    """Describe latent attention with a rotated part.

    YaRN sharpens it by mscale^2, with `mscale_all_dim`, beside what it does to cosines and sines.
    """
    if hf.boolean("attention_bias", default=False):
        raise UnsupportedModel(
            f"{hf.path}: attention_bias is true, want false: this kind of {hf.model_type} is not "
            "supported, serve another model"
        )
    nope_dim, rope_dim = hf.integer("qk_nope_head_dim", low=1), hf.integer("qk_rope_head_dim")
    rope = hf.rope
    all_dims = rope.number("mscale_all_dim", 0.0)
    mscale = 1.0 if rope.yarn is None else yarn_mscale(rope.yarn.factor, all_dims)
    return LatentSpec(
        num_heads=hf.integer("num_attention_heads", low=1),
        q_lora_rank=hf.integer("q_lora_rank", 0),
        kv_lora_rank=hf.integer("kv_lora_rank", low=1),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=hf.integer("v_head_dim", low=1),
        scale=(nope_dim + rope_dim) ** -0.5 * mscale**2,
        rotary=RotarySpec(rope_dim, rope.theta, rope.yarn),
        is_interleaved=hf.boolean("rope_interleave", default=True),
    )


def build(spec: Architecture, place: Placement, *, num_positions: int) -> Decoder:
    """Make the model, its weights unwritten."""
    return Decoder(spec, place, num_positions=num_positions, is_zero_centred=False)


def ignore_rules(spec: Architecture) -> list[IgnoreRule]:
    """Tensors that are recognised and not loaded."""
    return head_rules(spec)
