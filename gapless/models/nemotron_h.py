"""Nemotron-H: Mamba-2, attention without positions, dense blocks and experts, one to a layer.

Its time steps are bounded by `time_step_limit`, which is no bound in all checkpoints; the
`time_step_min` and `_max` of its configs say how biases were initialised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.architecture import Architecture, LayerSpec, MtpNames
from gapless.core.specs.attention import AttentionSpec
from gapless.core.specs.feed_forward import Scoring, SquaredReluMoeSpec, SquaredReluSpec
from gapless.core.specs.linear import GateOrder, Recurrence, SsmSpec
from gapless.errors import ModelError, UnsupportedModel
from gapless.models.bamba import NO_LIMIT
from gapless.models.decoder import Decoder, head_rules
from gapless.models.feed_forward import grouped_moe
from gapless.models.mtp import MTP_RULE
from gapless.models.naming import SpelledDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gapless.config.hf import HfConfig
    from gapless.layers.placement import Placement
    from gapless.models.loader import IgnoreRule
    from gapless.models.naming import Spelling

SPELLING: Spelling = (
    (r"\.(input|post_attention)_layernorm\.", ".norm."),
    (r"\.(self_attn|mamba|mlp)\.", ".mixer."),
    (r"^model\.embed_tokens\.", "model.embeddings."),
    (r"^model\.norm\.", "model.norm_f."),
)
# a layer's letter in the authors' configs
PATTERN = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
ALIASES = {"mamba": "linear_attention", "attention": "full_attention"}


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    _check(hf)
    kinds = _kinds(hf, "layers_block_type", "hybrid_override_pattern")
    num_mtp_layers = hf.integer("num_nextn_predict_layers", 0)
    return Architecture(
        model_type=hf.model_type,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hf.integer("hidden_size"),
        layers=tuple(LAYERS[kind](hf) for kind in kinds),
        norm_eps=hf.number("layer_norm_epsilon"),
        ties_embeddings=hf.ties_embeddings,
        max_position=hf.max_position_embeddings,
        num_mtp_layers=num_mtp_layers,
        mtp_names=MtpNames.PARTS,
        own_mtp_layer=_mtp_layer(hf) if num_mtp_layers else None,
    )


def _kinds(hf: HfConfig, list_key: str, pattern_key: str) -> tuple[str, ...]:
    """Return each layer's kind, from a list or from a string of letters."""
    found = hf.strings(list_key)
    if found is None:
        found = tuple(PATTERN.get(letter, letter) for letter in hf.string(pattern_key))
        list_key = pattern_key
    kinds = tuple(ALIASES.get(kind, kind) for kind in found)
    unknown = sorted(set(kinds) - set(LAYERS))
    if unknown or not kinds:
        raise ModelError(
            f"{hf.path}: {list_key} has {', '.join(map(repr, unknown)) or 'no layer'}; want "
            f"{', '.join(LAYERS)}, or {' '.join(PATTERN)}: the config is damaged"
        )
    return kinds


def _mtp_layer(hf: HfConfig) -> LayerSpec:
    keys = ("mtp_layers_block_type", "mtp_hybrid_override_pattern")
    kinds: tuple[str, ...] = ("full_attention", "moe")
    if any(hf.values.get(key) is not None for key in keys):
        kinds = _kinds(hf, *keys)
    if len(kinds) != 2 or kinds[0] != "full_attention" or kinds[1] not in ("moe", "mlp"):
        raise UnsupportedModel(
            f"{hf.path}: {keys[0]} is {list(kinds)}, want attention and a block behind it; serve "
            "another model"
        )
    return LayerSpec(LAYERS[kinds[0]](hf).mixer, LAYERS[kinds[1]](hf).mlp)


def _mamba(hf: HfConfig) -> LayerSpec:
    num_heads, num_groups = hf.integer("mamba_num_heads", low=1), hf.integer("n_groups", low=1)
    if num_heads % num_groups:
        raise ModelError(
            f"{hf.path}: mamba_num_heads is {num_heads}, want a multiple of n_groups, which is "
            f"{num_groups}; the config is damaged"
        )
    has_bias = hf.boolean("use_bias", default=False)
    low, high = hf.numbers("time_step_limit", NO_LIMIT)
    spec = SsmSpec(
        recurrence=Recurrence.MAMBA2,
        num_key_heads=num_groups,
        num_value_heads=num_heads,
        key_dim=hf.integer("ssm_state_size", low=1),
        value_dim=hf.integer("mamba_head_dim", low=1),
        conv_width=hf.integer("conv_kernel", low=1),
        gate_order=GateOrder.GATE_FIRST,
        has_conv_bias=hf.boolean("use_conv_bias", default=True),
        has_bias=has_bias,
        has_output_bias=has_bias,
        time_step_limit=(low, high),
    )
    return LayerSpec(spec, None)


def _attention(hf: HfConfig) -> LayerSpec:
    num_heads = hf.integer("num_attention_heads", low=1)
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=hf.integer("num_key_value_heads", num_heads, low=1),
        # the second key is that of the first configs
        head_dim=hf.integer("head_dim", hf.optional_integer("attention_head_dim"), low=1),
        rotary_dim=0,
        rope_theta=0.0,
        has_qk_norm=False,
        has_output_gate=False,
    )
    return LayerSpec(spec, None)


def _moe(hf: HfConfig) -> LayerSpec:
    routed = grouped_moe(hf, Scoring.BIASED_SIGMOID)
    spec = SquaredReluMoeSpec(
        num_experts=routed.num_experts,
        num_active=routed.num_active,
        intermediate_size=routed.intermediate_size,
        shared_size=hf.integer("moe_shared_expert_intermediate_size"),
        renormalises=hf.boolean("norm_topk_prob", default=True),
        scoring=routed.scoring,
        num_groups=routed.num_groups,
        num_active_groups=routed.num_active_groups,
        scale=routed.scale,
        latent_size=hf.integer("moe_latent_size", 0),
    )
    return LayerSpec(None, spec)


def _mlp(hf: HfConfig) -> LayerSpec:
    return LayerSpec(None, SquaredReluSpec(hf.integer("intermediate_size", low=1)))


LAYERS: Mapping[str, Callable[[HfConfig], LayerSpec]] = {
    "linear_attention": _mamba,
    "full_attention": _attention,
    "moe": _moe,
    "mlp": _mlp,
}


def _check(hf: HfConfig) -> None:
    """Refuse what the description cannot say."""
    for key, wanted, found in (
        ("mlp_hidden_act", "relu2", hf.optional_string("mlp_hidden_act") or "relu2"),
        ("mamba_hidden_act", "silu", hf.optional_string("mamba_hidden_act") or "silu"),
        ("mlp_bias", False, hf.boolean("mlp_bias", default=False)),
        ("attention_bias", False, hf.boolean("attention_bias", default=False)),
    ):
        if found != wanted:
            raise UnsupportedModel(
                f"{hf.path}: {key} is {found!r}, want {wanted!r}: this kind of {hf.model_type} is "
                "not supported, serve another model"
            )


def build(spec: Architecture, place: Placement, *, num_positions: int) -> Decoder:
    """Make the model, its weights unwritten."""
    return SpelledDecoder(spec, place, SPELLING, num_positions=num_positions)


def ignore_rules(spec: Architecture) -> list[IgnoreRule]:
    """Tensors that are recognised and not loaded."""
    return [*head_rules(spec, embedding="model.embeddings.weight"), MTP_RULE]
