"""OLMo Hybrid: Gated DeltaNet layers with full attention in between, each before a dense block.

Layers of the former have norms before mixer and block, layers of the latter behind both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.architecture import Architecture, LayerSpec
from gapless.core.specs.attention import AttentionSpec, WideNormSpec
from gapless.core.specs.linear import Recurrence, SeparateDeltaSpec
from gapless.errors import ModelError
from gapless.models.decoder import Decoder, DecoderLayer, head_rules
from gapless.models.feed_forward import dense_mlps

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from gapless.config.hf import HfConfig
    from gapless.core.architecture import MixerSpec
    from gapless.layers.batch import AttentionBatch, LayerMemory
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target
    from gapless.models.loader import IgnoreRule
    from gapless.models.mixers import NormStyle

# of the linear layers' output norm, whatever rms_norm_eps says
OUTPUT_NORM_EPS = 1e-5


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    mixers: dict[str, MixerSpec] = {
        "linear_attention": _delta_net(hf),
        "full_attention": _attention(hf),
    }
    kinds = hf.layer_types(tuple(mixers))
    return Architecture(
        model_type=hf.model_type,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=hf.integer("hidden_size"),
        layers=tuple(map(LayerSpec, (mixers[kind] for kind in kinds), dense_mlps(hf))),
        norm_eps=hf.number("rms_norm_eps"),
        ties_embeddings=hf.ties_embeddings,
        max_position=hf.max_position_embeddings,
    )


def _delta_net(hf: HfConfig) -> SeparateDeltaSpec:
    num_heads = hf.integer("num_attention_heads", low=1)
    num_key_heads = hf.integer("linear_num_key_heads", num_heads, low=1)
    num_value_heads = hf.integer("linear_num_value_heads", num_heads, low=1)
    if num_value_heads % num_key_heads:
        raise ModelError(
            f"{hf.path}: linear_num_value_heads is {num_value_heads}, want a multiple of "
            f"linear_num_key_heads, which is {num_key_heads}; the config is damaged"
        )
    default_dim = 3 * hf.integer("hidden_size") // (4 * num_key_heads)
    key_dim = hf.integer("linear_key_head_dim", default_dim, low=1)
    may_be_negative = hf.boolean("linear_allow_neg_eigval", default=True)
    return SeparateDeltaSpec(
        recurrence=Recurrence.GATED_DELTA,
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=key_dim,
        value_dim=hf.integer("linear_value_head_dim", 2 * key_dim, low=1),
        conv_width=hf.integer("linear_conv_kernel_dim", 4, low=1),
        beta_scale=2.0 if may_be_negative else 1.0,
        norm_eps=OUTPUT_NORM_EPS,
    )


def _attention(hf: HfConfig) -> WideNormSpec:
    num_heads = hf.integer("num_attention_heads", low=1)
    head_dim = hf.integer("head_dim", hf.integer("hidden_size") // num_heads, low=1)
    rope = hf.rope if hf.has_rope else None
    has_bias = hf.boolean("attention_bias", default=False)
    return WideNormSpec(
        num_heads=num_heads,
        num_kv_heads=hf.integer("num_key_value_heads", num_heads, low=1),
        head_dim=head_dim,
        rotary_dim=head_dim if rope else 0,
        rope_theta=rope.theta if rope else 0.0,
        has_qk_norm=False,
        has_output_gate=False,
        has_bias=has_bias,
        has_output_bias=has_bias,
        yarn=rope.yarn if rope else None,
    )


class _PreNormLayer(DecoderLayer):
    """A linear layer, whose norms have their names in files or in the reference code's memory."""

    def targets(self, prefix: str, stored_names: Collection[str]) -> dict[str, Target]:
        """Checkpoint names and where they go, see `Decoder.targets`."""
        names = {
            "input_layernorm": ("attention_layer_norm", "input_layernorm"),
            "post_attention_layernorm": ("feedforward_layer_norm", "post_attention_layernorm"),
        }
        return _renamed(super().targets(prefix, stored_names), prefix, names, stored_names)


class _PostNormLayer(DecoderLayer):
    """`x + norm(mixer(x))`, then `x + norm(block(x))`."""

    def __call__(
        self,
        x: Tensor,
        term: Tensor | None,
        rotary: Tensor,
        memory: LayerMemory,
        batch: AttentionBatch,
    ) -> tuple[Tensor, Tensor | None]:
        """Map `x + term` `[T, D]` to such a pair."""
        assert self._mixer is not None, "the layer has both parts"
        assert self._mlp is not None, "the layer has both parts"
        if term is not None:
            x = x + term
        x = x + self._input_norm(self._mixer(x, rotary, memory, batch))
        return x, self._mlp_norm(self._mlp(x, batch.live))

    def targets(self, prefix: str, stored_names: Collection[str]) -> dict[str, Target]:
        """Checkpoint names and where they go, see `Decoder.targets`."""
        names = {
            # transformers saves the first with the second name
            "input_layernorm": ("post_attention_layernorm", "feedforward_layer_norm"),
            "post_attention_layernorm": ("post_feedforward_layernorm",),
        }
        return _renamed(super().targets(prefix, stored_names), prefix, names, stored_names)


def _renamed(
    found: dict[str, Target],
    prefix: str,
    names: Mapping[str, tuple[str, ...]],
    stored_names: Collection[str],
) -> dict[str, Target]:
    """Rename a layer's norms to the first of their names that the files hold."""
    result = dict(found)
    taken = {f"{prefix}{name}.weight": result.pop(f"{prefix}{name}.weight") for name in names}
    for name, choices in names.items():
        spelled = [f"{prefix}{choice}.weight" for choice in choices]
        chosen = next((one for one in spelled if one in stored_names), spelled[0])
        result[chosen] = taken[f"{prefix}{name}.weight"]
    return result


class OlmoHybrid(Decoder):
    """A decoder in which the mixer decides where a layer's norms are."""

    def make_layer(self, spec: LayerSpec, place: Placement, norm: NormStyle) -> DecoderLayer:
        """Make a layer."""
        kind = _PostNormLayer if isinstance(spec.mixer, AttentionSpec) else _PreNormLayer
        return kind(self.architecture.hidden_size, spec, place, norm)


def build(spec: Architecture, place: Placement, *, num_positions: int) -> Decoder:
    """Make the model, its weights unwritten."""
    return OlmoHybrid(spec, place, num_positions=num_positions, is_zero_centred=False)


def ignore_rules(spec: Architecture) -> list[IgnoreRule]:
    """Tensors that are recognised and not loaded."""
    return head_rules(spec)
