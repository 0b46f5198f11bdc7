"""MiniMax-Text-01 and M1: lightning attention with full attention in between, each before experts.

The residual stream of a layer is the output of its norm: `x = a norm(x) + b mixer(norm(x))`, and
the same of the block. A norm does not see what its input is multiplied by, up to its epsilon. So
x / a takes the place of x here: `norm(x) + (b / a) mixer(norm(x))`, with b / a part of the weights,
and the next norm has epsilon / a^2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gapless.core.architecture import Architecture, NormedResidualSpec, WeightScale
from gapless.core.specs.feed_forward import MoeSpec
from gapless.core.specs.linear import LightningSpec
from gapless.errors import ModelError, UnsupportedModel
from gapless.models.decoder import Decoder, DecoderLayer, head_rules
from gapless.models.feed_forward import check_blocks
from gapless.models.loader import IgnoreRule
from gapless.models.naming import SpelledDecoder
from gapless.models.qwen3 import attention_of

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.config.hf import HfConfig
    from gapless.core.architecture import LayerSpec
    from gapless.layers.batch import AttentionBatch, LayerMemory
    from gapless.layers.placement import Placement
    from gapless.models.mixers import NormStyle
    from gapless.models.naming import Spelling

SPELLING: Spelling = (
    (r"\.mlp\.(experts\.\d+)\.gate_proj\.", r".mlp.\1.w1."),
    (r"\.mlp\.(experts\.\d+)\.up_proj\.", r".mlp.\1.w3."),
    (r"\.mlp\.(experts\.\d+)\.down_proj\.", r".mlp.\1.w2."),
    (r"\.mlp\.", ".block_sparse_moe."),
)
# of the lightning layers' norm, whatever rms_norm_eps says
OUTPUT_NORM_EPS = 1e-6
# in the depth of a layer, so that the last one's decays are not 0
DEPTH_EPS = 1e-5
# the outputs of the parts that have factors
PARTS = {
    "linear_attn": r"model\.layers\.\d+\.self_attn\.out_proj\.weight",
    "full_attn": r"model\.layers\.\d+\.self_attn\.o_proj\.(weight|bias)",
    "mlp": r"model\.layers\.\d+\.mlp\.experts\.\d+\.down_proj\.weight",
}


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    alphas = {part: _factor(hf, f"{part}_alpha_factor") for part in PARTS}
    betas = {part: _factor(hf, f"{part}_beta_factor") for part in PARTS}
    return Architecture(
        model_type=hf.model_type,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hf.integer("hidden_size"),
        layers=_layers(hf, alphas),
        norm_eps=hf.number("rms_norm_eps"),
        ties_embeddings=hf.ties_embeddings,
        max_position=hf.max_position_embeddings,
        weight_scales=tuple(
            WeightScale(pattern, (betas[part] / alphas[part],)) for part, pattern in PARTS.items()
        ),
    )


def _factor(hf: HfConfig, key: str) -> float:
    found = hf.number(key, 1.0)
    if found <= 0.0:
        raise UnsupportedModel(
            f"{hf.path}: {key} is {found}, want a number above 0: this kind of {hf.model_type} is "
            "not supported, serve another model"
        )
    return found


def _layers(hf: HfConfig, alphas: dict[str, float]) -> tuple[NormedResidualSpec, ...]:
    if hf.values.get("sliding_window") is not None:
        raise UnsupportedModel(
            f"{hf.path}: sliding_window is {hf.values['sliding_window']}, want null; only full "
            "attention is supported: set it to null if contexts stay within the window"
        )
    if hf.strings("layer_types") is None:
        raise ModelError(
            f"{hf.path}: layer_types is missing, want 'linear_attention' or 'full_attention' for "
            "each layer: download the checkpoint again"
        )
    attention, experts = attention_of(hf, has_qk_norm=False), _experts(hf)
    # the authors' key
    attention = replace(attention, rotary_dim=hf.integer("rotary_dim", attention.rotary_dim))
    kinds = hf.layer_types(("linear_attention", "full_attention"))
    return tuple(
        NormedResidualSpec(
            mixer=attention if kind == "full_attention" else _lightning(hf, index),
            mlp=experts,
            mixer_factor=alphas[kind.replace("attention", "attn")],
            mlp_factor=alphas["mlp"],
        )
        for index, kind in enumerate(kinds)
    )


def _lightning(hf: HfConfig, index: int) -> LightningSpec:
    num_heads = hf.integer("num_attention_heads", low=1)
    depth = index / (hf.integer("num_hidden_layers") - 1 + DEPTH_EPS)
    return LightningSpec.of(
        num_heads,
        hf.integer("head_dim", hf.integer("hidden_size") // num_heads, low=1),
        slope_scale=1.0 - depth + DEPTH_EPS,
        norm_eps=OUTPUT_NORM_EPS,
    )


def _experts(hf: HfConfig) -> MoeSpec:
    check_blocks(hf)
    num_experts = hf.integer("num_local_experts", low=1)
    num_active = hf.integer("num_experts_per_tok", low=1)
    if num_active > num_experts:
        raise ModelError(
            f"{hf.path}: num_experts_per_tok is {num_active}, want at most num_local_experts, "
            f"which is {num_experts}; the config is damaged"
        )
    return MoeSpec(
        num_experts=num_experts,
        num_active=num_active,
        intermediate_size=hf.integer("intermediate_size", low=1),
        shared_size=0,
        renormalises=True,
    )


class _NormedResidualLayer(DecoderLayer):
    """`norm(x) + mixer(norm(x))`, then the same of the block."""

    def __call__(
        self,
        x: Tensor,
        term: Tensor | None,
        rotary: Tensor,
        memory: LayerMemory,
        batch: AttentionBatch,
    ) -> tuple[Tensor, Tensor | None]:
        """Map `x + term` `[T, D]` to such a pair: the next norm adds it up."""
        assert self._mixer is not None, "the layer has both parts"
        assert self._mlp is not None, "the layer has both parts"
        _, normed = self._input_norm.of_sum(x, term)
        _, normed = self._mlp_norm.of_sum(normed, self._mixer(normed, rotary, memory, batch))
        return normed, self._mlp(normed, batch.live)

    def divide_eps(self, before: float, between: float) -> None:
        """Give the norms the epsilon of what comes divided by these factors."""
        self._input_norm.eps /= before**2
        self._mlp_norm.eps /= between**2


class MiniMax(SpelledDecoder):
    """A decoder whose residual stream is what its norms give."""

    def __init__(self, spec: Architecture, place: Placement, *, num_positions: int) -> None:
        super().__init__(spec, place, SPELLING, num_positions=num_positions)
        before = 1.0
        for layer, own in zip(self._layers, spec.layers, strict=True):
            assert isinstance(layer, _NormedResidualLayer), "what make_layer makes"
            assert isinstance(own, NormedResidualSpec), "what architecture describes"
            layer.divide_eps(before, own.mixer_factor)
            before = own.mlp_factor
        self._norm.eps /= before**2

    def make_layer(self, spec: LayerSpec, place: Placement, norm: NormStyle) -> DecoderLayer:
        """Make a layer."""
        return _NormedResidualLayer(self.architecture.hidden_size, spec, place, norm)


def build(spec: Architecture, place: Placement, *, num_positions: int) -> Decoder:
    """Make the model, its weights unwritten."""
    return MiniMax(spec, place, num_positions=num_positions)


def ignore_rules(spec: Architecture) -> list[IgnoreRule]:
    """Tensors that are recognised and not loaded."""
    return [
        *head_rules(spec),
        IgnoreRule(
            r"model\.layers\.\d+\.self_attn\.(slope_rate|(query|key|diagonal)_decay)",
            "decays follow from the config",
        ),
    ]
