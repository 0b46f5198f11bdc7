"""Kimi-Linear: Kimi Delta Attention with latent attention in between, which rotates nothing.

Checkpoints call the feed-forward block `block_sparse_moe`, and its experts' matrices `w1`, `w3`
and `w2`. A dense block is `mlp` in the authors' checkpoints and `block_sparse_moe` in those that
transformers writes; both load.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gapless.core.architecture import Architecture, LayerSpec
from gapless.core.specs.attention import LatentSpec
from gapless.core.specs.feed_forward import MoeSpec, Scoring
from gapless.core.specs.linear import KdaSpec, Recurrence
from gapless.errors import ModelError, UnsupportedModel
from gapless.models.decoder import Decoder, head_rules
from gapless.models.feed_forward import RouterKeys, grouped_moe, sparse_behind_dense

if TYPE_CHECKING:
    from collections.abc import Collection

    from gapless.config.hf import HfConfig
    from gapless.core.architecture import MixerSpec
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target
    from gapless.models.loader import IgnoreRule

ROUTER_KEYS = RouterKeys(
    num_experts="num_experts",
    num_active="num_experts_per_token",
    num_shared="num_shared_experts",
    num_groups="num_expert_group",
    renormalises="moe_renormalize",
)


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    _check(hf)
    nope_dim, rope_dim = hf.integer("qk_nope_head_dim", low=1), hf.integer("qk_rope_head_dim")
    mixers: dict[str, MixerSpec] = {
        "linear_attention": _kimi_delta(hf),
        "full_attention": LatentSpec(
            num_heads=hf.integer("num_attention_heads", low=1),
            q_lora_rank=hf.integer("q_lora_rank", 0),
            kv_lora_rank=hf.integer("kv_lora_rank", low=1),
            nope_dim=nope_dim,
            rope_dim=rope_dim,
            value_dim=hf.integer("v_head_dim", low=1),
            scale=(nope_dim + rope_dim) ** -0.5,
            rotary=None,
        ),
    }
    sparse = grouped_moe(hf, Scoring.BIASED_SIGMOID, keys=ROUTER_KEYS)
    return Architecture(
        model_type=hf.model_type,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hf.integer("hidden_size"),
        layers=tuple(
            LayerSpec(mixers[kind], mlp)
            for kind, mlp in zip(_layer_types(hf), sparse_behind_dense(hf, sparse), strict=True)
        ),
        norm_eps=hf.number("rms_norm_eps"),
        ties_embeddings=hf.ties_embeddings,
        max_position=hf.integer("model_max_length", low=1),
    )


def build(spec: Architecture, place: Placement, *, num_positions: int) -> Decoder:
    """Make the model, its weights unwritten."""
    return KimiLinear(spec, place, num_positions=num_positions, is_zero_centred=False)


def ignore_rules(spec: Architecture) -> list[IgnoreRule]:
    """Tensors that are recognised and not loaded."""
    return head_rules(spec)


class KimiLinear(Decoder):
    """A decoder whose feed-forward blocks have other names in checkpoints."""

    def targets(self, stored_names: Collection[str]) -> dict[str, Target]:
        """See `Decoder.targets`."""
        is_sparse = [isinstance(layer.mlp, MoeSpec) for layer in self.architecture.layers]
        return {
            _stored_name(name, is_sparse, stored_names): target
            for name, target in super().targets(stored_names).items()
        }


def _stored_name(name: str, is_sparse: list[bool], stored_names: Collection[str]) -> str:
    """Spell the name of a block's tensor as the files do."""
    match = re.fullmatch(r"(model\.layers\.(\d+)\.)mlp\.(.+)", name)
    if match is None:
        return name
    layer, index, rest = match.groups()
    renamed = f"{layer}block_sparse_moe.{rest}"
    if not is_sparse[int(index)]:
        return renamed if renamed in stored_names else name
    for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        renamed = re.sub(rf"(experts\.\d+\.){ours}\.", rf"\g<1>{theirs}.", renamed)
    return renamed


def _kimi_delta(hf: HfConfig) -> KdaSpec:
    section = hf.section("linear_attn_config")
    if section is None:
        heads, head_dim = hf.integer("linear_num_heads", low=1), hf.integer("linear_head_dim")
        width = hf.integer("linear_conv_kernel_dim", low=1)
    else:
        heads, head_dim = section.integer("num_heads", low=1), section.integer("head_dim", low=1)
        width = section.integer("short_conv_kernel_size", low=1)
    return KdaSpec(
        recurrence=Recurrence.KIMI_DELTA,
        num_key_heads=heads,
        num_value_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        conv_width=width,
        gate_rank=head_dim,
    )


def _layer_types(hf: HfConfig) -> tuple[str, ...]:
    """Return each layer's type, which the authors' configs list by number, counted from 1."""
    section = hf.section("linear_attn_config")
    if section is None or hf.values.get("layer_types") is not None:
        return hf.layer_types(("linear_attention", "full_attention"))
    linear, full = section.integers("kda_layers"), section.integers("full_attn_layers")
    num_layers = hf.integer("num_hidden_layers", low=1)
    if sorted(linear + full) != list(range(1, num_layers + 1)):
        raise ModelError(
            f"{hf.path}: kda_layers and full_attn_layers of linear_attn_config name layers "
            f"{sorted(linear + full)}, want each of 1 to {num_layers} once; the config is damaged"
        )
    return tuple(
        "linear_attention" if index + 1 in linear else "full_attention"
        for index in range(num_layers)
    )


def _check(hf: HfConfig) -> None:
    """Refuse what the description cannot say."""
    for key, wanted, found in (
        ("mla_use_nope", True, hf.boolean("mla_use_nope", default=True)),
        ("attention_bias", False, hf.boolean("attention_bias", default=False)),
        (
            "moe_router_activation_func",
            "sigmoid",
            hf.optional_string("moe_router_activation_func") or "sigmoid",
        ),
    ):
        if found != wanted:
            raise UnsupportedModel(
                f"{hf.path}: {key} is {found!r}, want {wanted!r}: this kind of {hf.model_type} is "
                "not supported, serve another model"
            )
