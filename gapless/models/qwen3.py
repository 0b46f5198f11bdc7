"""Qwen3 dense: full attention with q/k norm in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.architecture import Architecture, AttentionSpec, LayerSpec, MlpSpec
from gapless.models.decoder import Decoder
from gapless.models.loader import IgnoreRule

if TYPE_CHECKING:
    from gapless.config.hf import HfConfig
    from gapless.layers.placement import Placement


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    num_heads = hf.integer("num_attention_heads")
    head_dim = hf.integer("head_dim", hf.integer("hidden_size") // num_heads)
    layer = LayerSpec(
        AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=hf.integer("num_key_value_heads", num_heads),
            head_dim=head_dim,
            rotary_dim=int(head_dim * hf.rope.rotary_factor),
            rope_theta=hf.rope.theta,
            has_qk_norm=True,
            has_output_gate=False,
            has_bias=hf.boolean("attention_bias", default=False),
        ),
        MlpSpec(hf.integer("intermediate_size")),
    )
    return Architecture(
        model_type=hf.model_type,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hf.integer("hidden_size"),
        layers=(layer,) * hf.integer("num_hidden_layers"),
        norm_eps=hf.number("rms_norm_eps"),
        ties_embeddings=hf.ties_embeddings,
        max_position=hf.max_position_embeddings,
    )


def build(spec: Architecture, place: Placement, *, num_positions: int) -> Decoder:
    """Make the model, its weights unwritten."""
    return Decoder(spec, place, num_positions=num_positions, is_zero_centred=False)


def ignore_rules(spec: Architecture) -> list[IgnoreRule]:
    """Tensors that are recognised and not loaded."""
    if spec.ties_embeddings:
        return [IgnoreRule(r"lm_head\.weight", "the head is the embedding")]
    return []
