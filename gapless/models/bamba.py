"""Bamba: Mamba-2 layers with full attention in between, each before a dense block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.architecture import Architecture, LayerSpec
from gapless.core.specs.linear import GateOrder, Recurrence, SsmSpec
from gapless.errors import ModelError
from gapless.models.decoder import Decoder, head_rules
from gapless.models.feed_forward import dense_mlps
from gapless.models.naming import SpelledDecoder
from gapless.models.qwen3 import attention_of

if TYPE_CHECKING:
    from gapless.config.hf import HfConfig
    from gapless.core.architecture import MixerSpec
    from gapless.layers.placement import Placement
    from gapless.models.loader import IgnoreRule
    from gapless.models.naming import Spelling

SPELLING: Spelling = (
    (r"\.mlp\.", ".feed_forward."),
    (r"\.post_attention_layernorm\.", ".pre_ff_layernorm."),
    (r"^model\.norm\.", "model.final_layernorm."),
)
NO_LIMIT = (0.0, float("inf"))


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    full = hf.integers("attn_layer_indices")
    mamba, attention = mamba2(hf), attention_of(hf, has_qk_norm=False)
    mixers: list[MixerSpec] = [
        attention if index in full else mamba for index in range(hf.integer("num_hidden_layers"))
    ]
    return Architecture(
        model_type=hf.model_type,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hf.integer("hidden_size"),
        layers=tuple(map(LayerSpec, mixers, dense_mlps(hf))),
        norm_eps=hf.number("rms_norm_eps"),
        ties_embeddings=hf.ties_embeddings,
        max_position=hf.max_position_embeddings,
    )


def mamba2(
    hf: HfConfig,
    *,
    gate_order: GateOrder = GateOrder.GATE_FIRST,
    output_bias_key: str = "mamba_proj_bias",
) -> SsmSpec:
    """Describe a Mamba-2 layer from the keys that its families share.

    Raises:
        ModelError: heads or groups do not divide the layer.
    """
    inner = hf.integer("mamba_d_ssm", hf.integer("mamba_expand", 2) * hf.integer("hidden_size"))
    num_heads, num_groups = hf.integer("mamba_n_heads", low=1), hf.integer("mamba_n_groups", low=1)
    found = hf.values.get("mamba_d_head")
    sizes = (None, "auto", inner // num_heads)
    if inner % num_heads or num_heads % num_groups or found not in sizes:
        raise ModelError(
            f"{hf.path}: mamba_n_heads={num_heads} heads of mamba_d_head={found!r} in "
            f"mamba_n_groups={num_groups} groups make up {inner} channels, want equal groups of "
            "equal heads; the config is damaged"
        )
    low, high = hf.numbers("time_step_limit", NO_LIMIT)
    return SsmSpec(
        recurrence=Recurrence.MAMBA2,
        num_key_heads=num_groups,
        num_value_heads=num_heads,
        key_dim=hf.integer("mamba_d_state", low=1),
        value_dim=inner // num_heads,
        conv_width=hf.integer("mamba_d_conv", low=1),
        gate_order=gate_order,
        has_conv_bias=hf.boolean("mamba_conv_bias", default=True),
        has_bias=hf.boolean("mamba_proj_bias", default=False),
        has_output_bias=hf.boolean(output_bias_key, default=False),
        time_step_limit=(low, high),
    )


def build(spec: Architecture, place: Placement, *, num_positions: int) -> Decoder:
    """Make the model, its weights unwritten."""
    return SpelledDecoder(spec, place, SPELLING, num_positions=num_positions)


def ignore_rules(spec: Architecture) -> list[IgnoreRule]:
    """Tensors that are recognised and not loaded."""
    return head_rules(spec)
