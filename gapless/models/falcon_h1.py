"""Falcon-H1: Mamba-2 and full attention side by side in every layer, and factors everywhere.

The factors (Zuo et al. 2025, "Falcon-H1", section 3.2.3) scale inputs and outputs of products, and
so become part of the weights; that of the keys becomes part of what scores are multiplied by.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gapless.core.architecture import Architecture, LayerSpec, ParallelSpec, WeightScale
from gapless.core.specs.linear import GateOrder
from gapless.models.bamba import build, ignore_rules, mamba2
from gapless.models.feed_forward import dense_mlps
from gapless.models.qwen3 import attention_of

if TYPE_CHECKING:
    from gapless.config.hf import HfConfig
    from gapless.core.specs.linear import SsmSpec

__all__ = ["architecture", "build", "ignore_rules"]

LAYER = r"model\.layers\.\d+\."


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    order = GateOrder.GATE_ALONE
    if hf.boolean("mamba_rms_norm", default=False):
        norm_first = hf.boolean("mamba_norm_before_gate", default=True)
        order = GateOrder.NORM_FIRST if norm_first else GateOrder.GATE_FIRST
    ssm = mamba2(hf, gate_order=order, output_bias_key="projectors_bias")
    attention = attention_of(hf, has_qk_norm=False)
    scale = attention.head_dim**-0.5 * hf.number("key_multiplier", 1.0)
    mixer = ParallelSpec(ssm, replace(attention, score_scale=scale))
    return Architecture(
        model_type=hf.model_type,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hf.integer("hidden_size"),
        layers=tuple(LayerSpec(mixer, mlp) for mlp in dense_mlps(hf)),
        norm_eps=hf.number("rms_norm_eps"),
        ties_embeddings=hf.ties_embeddings,
        max_position=hf.max_position_embeddings,
        embedding_scale=hf.number("embedding_multiplier", 1.0),
        logit_scale=hf.number("lm_head_multiplier", 1.0),
        weight_scales=_weight_scales(hf, ssm),
    )


def _weight_scales(hf: HfConfig, ssm: SsmSpec) -> tuple[WeightScale, ...]:
    gate, down = hf.numbers("mlp_multipliers", (1.0,) * 2)
    attention_in = hf.number("attention_in_multiplier", 1.0)
    attention_out = hf.number("attention_out_multiplier", 1.0)
    ssm_in, ssm_out = hf.number("ssm_in_multiplier", 1.0), hf.number("ssm_out_multiplier", 1.0)
    parts = hf.numbers("ssm_multipliers", (1.0,) * 5)
    group_size = ssm.num_key_heads * ssm.key_dim
    rows = (ssm.inner_size, ssm.inner_size, group_size, group_size, ssm.num_value_heads)
    # what scales an input leaves the bias alone
    return (
        WeightScale(rf"{LAYER}self_attn\.[qkv]_proj\.weight", (attention_in,)),
        WeightScale(rf"{LAYER}self_attn\.o_proj\.(weight|bias)", (attention_out,)),
        WeightScale(rf"{LAYER}mamba\.in_proj\.weight", tuple(ssm_in * p for p in parts), rows),
        WeightScale(rf"{LAYER}mamba\.in_proj\.bias", parts, rows),
        WeightScale(rf"{LAYER}mamba\.out_proj\.(weight|bias)", (ssm_out,)),
        WeightScale(rf"{LAYER}mlp\.gate_proj\.weight", (gate,)),
        WeightScale(rf"{LAYER}mlp\.down_proj\.weight", (down,)),
    )
