"""An artificial model whose config lists its layers: kinds that no published model has together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from gapless.core.architecture import Architecture, LayerSpec, ParallelSpec
from gapless.core.specs.attention import AttentionSpec
from gapless.core.specs.feed_forward import MlpSpec
from gapless.core.specs.linear import (
    GateOrder,
    KdaSpec,
    LightningSpec,
    LinearSpec,
    Recurrence,
    ShortConvSpec,
    SsmSpec,
)
from gapless.models.decoder import head_rules
from gapless.models.qwen3 import build

if TYPE_CHECKING:
    from gapless.config.hf import HfConfig
    from gapless.models.loader import IgnoreRule

__all__ = ["architecture", "build", "ignore_rules"]

HIDDEN = 48
BLOCK = MlpSpec(56)
ATTENTION = AttentionSpec(4, 2, 16, 8, 2e4, has_qk_norm=True, has_output_gate=True)
MAMBA = SsmSpec(
    Recurrence.MAMBA2, 2, 4, 16, 24, 3, gate_order=GateOrder.NORM_FIRST, has_conv_bias=True,
    has_bias=False, has_output_bias=False,
)  # fmt: skip
# the first two differ in nothing but the recurrence, and all convolutions in their widths
LAYERS = {
    "delta": LayerSpec(LinearSpec(Recurrence.GATED_DELTA, 2, 4, 16, 24, 4), BLOCK),
    "mamba": LayerSpec(MAMBA, None),
    "kimi": LayerSpec(KdaSpec(Recurrence.KIMI_DELTA, 3, 3, 12, 12, 2, gate_rank=12), BLOCK),
    "lightning": LayerSpec(LightningSpec.of(3, 12, slope_scale=0.5, norm_eps=1e-6), BLOCK),
    "conv": LayerSpec(ShortConvSpec.of(HIDDEN, 5, has_bias=True), BLOCK),
    "attention": LayerSpec(ATTENTION, BLOCK),
    "parallel": LayerSpec(ParallelSpec(MAMBA, ATTENTION), BLOCK),
    "block": LayerSpec(None, BLOCK),
}


def architecture(hf: HfConfig) -> Architecture:
    """Describe the layers that the config lists; `conv_width` is that of all, if it is given."""
    width = hf.optional_integer("conv_width")
    kinds = hf.strings("kinds")
    assert kinds is not None
    return Architecture(
        model_type=hf.model_type,
        vocab_size=hf.integer("vocab_size"),
        hidden_size=HIDDEN,
        layers=tuple(with_width(LAYERS[kind], width) for kind in kinds),
        norm_eps=1e-6,
        ties_embeddings=False,
        max_position=512,
    )


def with_width(layer: LayerSpec, width: int | None) -> LayerSpec:
    """Give a layer's convolution another width."""
    match layer.mixer:
        case LinearSpec() as mixer if width is not None:
            return replace(layer, mixer=replace(mixer, conv_width=width))
        case ParallelSpec(ssm, attention) if width is not None:
            mixer = ParallelSpec(replace(ssm, conv_width=width), attention)
            return replace(layer, mixer=mixer)
        case _:
            return layer


def ignore_rules(spec: Architecture) -> list[IgnoreRule]:
    """There are no such tensors."""
    return head_rules(spec)
