"""Qwen3.5 dense text model: Gated DeltaNet layers with full attention in between, and an MTP layer.

Also inside the multimodal wrapper, whose vision tensors are skipped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.architecture import Architecture, LayerSpec
from gapless.core.specs.attention import AttentionSpec
from gapless.core.specs.linear import LinearSpec, Recurrence
from gapless.errors import ModelError
from gapless.models.decoder import Decoder, head_rules
from gapless.models.feed_forward import dense_mlps
from gapless.models.loader import IgnoreRule
from gapless.models.mtp import MTP_RULE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.config.hf import HfConfig
    from gapless.core.specs.feed_forward import MlpSpec, MoeSpec
    from gapless.layers.placement import Placement


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    return hybrid_attention(hf, dense_mlps(hf), has_grouped_rows=False)


def hybrid_attention(
    hf: HfConfig, mlps: Sequence[MlpSpec | MoeSpec], *, has_grouped_rows: bool
) -> Architecture:
    """Describe a model of the family, each layer's mixer before its feed-forward block."""
    head_dim = hf.integer("head_dim")
    attention = AttentionSpec(
        num_heads=hf.integer("num_attention_heads"),
        num_kv_heads=hf.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * hf.rope.rotary_factor),
        rope_theta=hf.rope.theta,
        has_qk_norm=True,
        has_output_gate=True,
        has_bias=hf.boolean("attention_bias", default=False),
        has_output_bias=hf.boolean("attention_bias", default=False),
        yarn=hf.rope.yarn,
    )
    linear = LinearSpec(
        recurrence=Recurrence.GATED_DELTA,
        num_key_heads=hf.integer("linear_num_key_heads"),
        num_value_heads=hf.integer("linear_num_value_heads"),
        key_dim=hf.integer("linear_key_head_dim"),
        value_dim=hf.integer("linear_value_head_dim"),
        conv_width=hf.integer("linear_conv_kernel_dim"),
        has_grouped_rows=has_grouped_rows,
    )
    if linear.num_value_heads % linear.num_key_heads:
        raise ModelError(
            f"linear_num_value_heads={linear.num_value_heads} is not a multiple of "
            f"linear_num_key_heads={linear.num_key_heads}; the config is damaged"
        )
    mixers: dict[str, AttentionSpec | LinearSpec] = {
        "linear_attention": linear,
        "full_attention": attention,
    }
    return Architecture(
        model_type=hf.model_type,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hf.integer("hidden_size"),
        layers=tuple(
            LayerSpec(mixers[kind], mlp)
            for kind, mlp in zip(hf.layer_types(tuple(mixers)), mlps, strict=True)
        ),
        norm_eps=hf.number("rms_norm_eps"),
        ties_embeddings=hf.ties_embeddings,
        max_position=hf.max_position_embeddings,
        num_mtp_layers=hf.integer("mtp_num_hidden_layers", 0),
    )


def build(spec: Architecture, place: Placement, *, num_positions: int) -> Decoder:
    """Make the model, its weights unwritten."""
    return Decoder(spec, place, num_positions=num_positions, is_zero_centred=True)


def ignore_rules(spec: Architecture) -> list[IgnoreRule]:
    """Tensors that are recognised and not loaded."""
    return [
        *head_rules(spec),
        IgnoreRule(r"model\.visual\..*", "vision tensors: text only is served"),
        MTP_RULE,
    ]
