"""Granite 4: Mamba-2 layers with full attention in between, each before experts and a block that
every token runs through, or before the latter alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gapless.core.architecture import Architecture, LayerSpec, WeightScale
from gapless.core.specs.feed_forward import GroupedMoeSpec, MlpSpec, Scoring
from gapless.errors import ModelError
from gapless.models.bamba import mamba2
from gapless.models.decoder import Decoder, head_rules
from gapless.models.feed_forward import check_blocks
from gapless.models.naming import SpelledDecoder
from gapless.models.qwen3 import attention_of

if TYPE_CHECKING:
    from gapless.config.hf import HfConfig
    from gapless.core.architecture import MixerSpec
    from gapless.core.specs.attention import AttentionSpec
    from gapless.core.specs.feed_forward import BlockSpec
    from gapless.layers.placement import Placement
    from gapless.models.loader import IgnoreRule
    from gapless.models.naming import Spelling

SPELLING: Spelling = (
    (r"\.mlp\.gate\.weight$", ".block_sparse_moe.router.layer.weight"),
    (r"\.mlp\.experts\.gate_up_proj$", ".block_sparse_moe.input_linear.weight"),
    (r"\.mlp\.experts\.down_proj$", ".block_sparse_moe.output_linear.weight"),
    (r"\.mlp\.(shared_experts\.)?gate_up_proj\.", ".shared_mlp.input_linear."),
    (r"\.mlp\.(shared_experts\.)?down_proj\.", ".shared_mlp.output_linear."),
)
# what a layer adds to the residual stream comes out of these
OUTPUTS = (
    r"model\.layers\.\d+\.(self_attn\.o_proj|mamba\.out_proj"
    r"|mlp\.((shared_experts|experts\.\d+)\.)?down_proj)\.(weight|bias)"
)


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    block = _block(hf)
    mixers: dict[str, MixerSpec] = {
        "linear_attention": mamba2(hf),
        "full_attention": _attention(hf),
    }
    return Architecture(
        model_type=hf.model_type,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hf.integer("hidden_size"),
        layers=tuple(LayerSpec(mixers[kind], block) for kind in hf.layer_types(tuple(mixers))),
        norm_eps=hf.number("rms_norm_eps"),
        ties_embeddings=hf.ties_embeddings,
        max_position=hf.max_position_embeddings,
        embedding_scale=hf.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / hf.number("logits_scaling", 1.0),
        weight_scales=(WeightScale(OUTPUTS, (hf.number("residual_multiplier", 1.0),)),),
    )


def _attention(hf: HfConfig) -> AttentionSpec:
    found = attention_of(hf, has_qk_norm=False)
    if hf.optional_string("position_embedding_type") != "rope":
        found = replace(found, rotary_dim=0)
    return replace(found, score_scale=hf.number("attention_multiplier", 1.0))


def _block(hf: HfConfig) -> BlockSpec:
    """Describe a layer's block. Weights are a softmax over the chosen experts' scores, which is the
    share of each in their sum under a softmax over all."""
    check_blocks(hf)
    shared_size = hf.integer("shared_intermediate_size", low=1)
    num_experts = hf.integer("num_local_experts", 0)
    if not num_experts:
        return MlpSpec(shared_size)
    num_active = hf.integer("num_experts_per_tok", low=1)
    if num_active > num_experts:
        raise ModelError(
            f"{hf.path}: num_experts_per_tok is {num_active}, want at most num_local_experts, "
            f"which is {num_experts}; the config is damaged"
        )
    return GroupedMoeSpec(
        num_experts=num_experts,
        num_active=num_active,
        intermediate_size=hf.integer("intermediate_size", low=1),
        shared_size=shared_size,
        renormalises=True,
        scoring=Scoring.SOFTMAX,
        num_groups=1,
        num_active_groups=1,
        scale=1.0,
    )


def build(spec: Architecture, place: Placement, *, num_positions: int) -> Decoder:
    """Make the model, its weights unwritten."""
    return SpelledDecoder(spec, place, SPELLING, num_positions=num_positions)


def ignore_rules(spec: Architecture) -> list[IgnoreRule]:
    """Tensors that are recognised and not loaded."""
    return head_rules(spec)
