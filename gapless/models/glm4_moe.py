"""GLM-4 mixture of experts: full attention in every layer, DeepSeek-V3's router and MTP layer."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gapless.core.specs.attention import AttentionSpec
from gapless.core.specs.feed_forward import Scoring
from gapless.models.deepseek_v3 import ignore_rules, with_next_layer
from gapless.models.feed_forward import grouped_moe, sparse_behind_dense
from gapless.models.qwen3 import build, full_attention

if TYPE_CHECKING:
    from gapless.config.hf import HfConfig
    from gapless.core.architecture import Architecture, LayerSpec

__all__ = ["architecture", "build", "ignore_rules"]


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    mlps = sparse_behind_dense(hf, grouped_moe(hf, Scoring.BIASED_SIGMOID))
    has_qk_norm = hf.boolean("use_qk_norm", default=False)
    spec = full_attention(hf, mlps, has_qk_norm=has_qk_norm)
    # attention_bias means q, k and v here
    layers = tuple(_without_output_bias(layer) for layer in spec.layers)
    return with_next_layer(hf, replace(spec, layers=layers))


def _without_output_bias(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer.mixer, AttentionSpec), "all layers have full attention"
    return replace(layer, mixer=replace(layer.mixer, has_output_bias=False))
