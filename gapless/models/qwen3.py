"""Qwen3 dense: full attention with q/k norm in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.architecture import Architecture, LayerSpec
from gapless.core.specs.attention import AttentionSpec
from gapless.models.decoder import Decoder, head_rules
from gapless.models.feed_forward import dense_mlps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.config.hf import HfConfig
    from gapless.core.specs.feed_forward import MlpSpec, MoeSpec
    from gapless.layers.placement import Placement
    from gapless.models.loader import IgnoreRule


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    return full_attention(hf, dense_mlps(hf), has_qk_norm=True)


def full_attention(
    hf: HfConfig, mlps: Sequence[MlpSpec | MoeSpec], *, has_qk_norm: bool
) -> Architecture:
    """Describe a model with full attention in every layer, each before its feed-forward block."""
    attention = attention_of(hf, has_qk_norm=has_qk_norm)
    hf.layer_types(("full_attention",))
    return Architecture(
        model_type=hf.model_type,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hf.integer("hidden_size"),
        layers=tuple(LayerSpec(attention, mlp) for mlp in mlps),
        norm_eps=hf.number("rms_norm_eps"),
        ties_embeddings=hf.ties_embeddings,
        max_position=hf.max_position_embeddings,
    )


def attention_of(hf: HfConfig, *, has_qk_norm: bool) -> AttentionSpec:
    """Describe full attention from the keys that most families share."""
    num_heads = hf.integer("num_attention_heads", low=1)
    head_dim = hf.integer("head_dim", hf.integer("hidden_size") // num_heads, low=1)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=hf.integer("num_key_value_heads", num_heads, low=1),
        head_dim=head_dim,
        rotary_dim=int(head_dim * hf.rope.rotary_factor),
        rope_theta=hf.rope.theta,
        has_qk_norm=has_qk_norm,
        has_output_gate=False,
        has_bias=hf.boolean("attention_bias", default=False),
        has_output_bias=hf.boolean("attention_bias", default=False),
        yarn=hf.rope.yarn,
    )


def build(spec: Architecture, place: Placement, *, num_positions: int) -> Decoder:
    """Make the model, its weights unwritten."""
    return Decoder(spec, place, num_positions=num_positions, is_zero_centred=False)


def ignore_rules(spec: Architecture) -> list[IgnoreRule]:
    """Tensors that are recognised and not loaded."""
    return head_rules(spec)
