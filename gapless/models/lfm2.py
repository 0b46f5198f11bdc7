"""LFM2: gated short convolutions with full attention in between, each before a dense block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.architecture import Architecture, LayerSpec
from gapless.core.specs.feed_forward import MlpSpec
from gapless.core.specs.linear import ShortConvSpec
from gapless.models.decoder import Decoder, head_rules
from gapless.models.naming import SpelledDecoder
from gapless.models.qwen3 import attention_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.config.hf import HfConfig
    from gapless.core.architecture import MixerSpec
    from gapless.core.specs.feed_forward import BlockSpec
    from gapless.layers.placement import Placement
    from gapless.models.loader import IgnoreRule
    from gapless.models.naming import Spelling

SPELLING: Spelling = (
    (r"\.self_attn\.([qk])_norm\.", r".self_attn.\1_layernorm."),
    (r"\.self_attn\.o_proj\.", ".self_attn.out_proj."),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".mlp.expert_bias"),
    (r"\.mlp\.((experts\.\d+\.)?)gate_proj\.", r".mlp.\1w1."),
    (r"\.mlp\.((experts\.\d+\.)?)up_proj\.", r".mlp.\1w3."),
    (r"\.mlp\.((experts\.\d+\.)?)down_proj\.", r".mlp.\1w2."),
    (r"\.mlp\.", ".feed_forward."),
    (r"\.input_layernorm\.", ".operator_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"^model\.norm\.", "model.embedding_norm."),
)


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    num_layers = hf.integer("num_hidden_layers", low=1)
    return convolutional(hf, (MlpSpec(_intermediate_size(hf)),) * num_layers)


def convolutional(hf: HfConfig, blocks: Sequence[BlockSpec]) -> Architecture:
    """Describe a model of the family, each layer's mixer before its block."""
    hidden_size = hf.integer("hidden_size")
    has_bias = hf.boolean("conv_bias", default=False)
    mixers: dict[str, MixerSpec] = {
        "conv": ShortConvSpec.of(hidden_size, hf.integer("conv_L_cache", low=1), has_bias=has_bias),
        "full_attention": attention_of(hf, has_qk_norm=True),
    }
    ties = hf.boolean("tie_word_embeddings", default=True)
    return Architecture(
        model_type=hf.model_type,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hidden_size,
        layers=tuple(
            LayerSpec(mixers[kind], block)
            for kind, block in zip(_layer_types(hf, tuple(mixers)), blocks, strict=True)
        ),
        norm_eps=hf.number("norm_eps"),
        # the authors' key is the first
        ties_embeddings=hf.boolean("tie_embedding", default=ties),
        max_position=hf.max_position_embeddings,
    )


def _layer_types(hf: HfConfig, known: tuple[str, ...]) -> tuple[str, ...]:
    if hf.values.get("layer_types") is not None or hf.values.get("full_attn_idxs") is None:
        return hf.layer_types(known)
    full = hf.integers("full_attn_idxs")
    num_layers = hf.integer("num_hidden_layers", low=1)
    return tuple("full_attention" if index in full else "conv" for index in range(num_layers))


def _intermediate_size(hf: HfConfig) -> int:
    """Return the block's size: that in the config is of a block without a gate, unless it says
    otherwise."""
    size = hf.integer("block_ff_dim", hf.optional_integer("intermediate_size", low=1), low=1)
    if not hf.boolean("block_auto_adjust_ff_dim", default=True):
        return size
    multiple = hf.integer("block_multiple_of", 256, low=1)
    size = int(hf.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    return -(-size // multiple) * multiple


def build(spec: Architecture, place: Placement, *, num_positions: int) -> Decoder:
    """Make the model, its weights unwritten."""
    return SpelledDecoder(spec, place, SPELLING, num_positions=num_positions)


def ignore_rules(spec: Architecture) -> list[IgnoreRule]:
    """Tensors that are recognised and not loaded."""
    return head_rules(spec)
