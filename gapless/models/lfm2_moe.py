"""LFM2 with experts: the first layers' blocks are dense."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.specs.feed_forward import GroupedMoeSpec, MlpSpec, Scoring
from gapless.errors import ModelError, UnsupportedModel
from gapless.models.lfm2 import build, convolutional, ignore_rules

if TYPE_CHECKING:
    from gapless.config.hf import HfConfig
    from gapless.core.architecture import Architecture

__all__ = ["architecture", "build", "ignore_rules"]

# beside the sum that weights are divided by, as the model's code has it
SUM_EPS = 1e-6


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    if not hf.boolean("use_expert_bias", default=True):
        raise UnsupportedModel(
            f"{hf.path}: use_expert_bias is false, want true: this kind of {hf.model_type} is not "
            "supported, serve another model"
        )
    num_experts, num_active = hf.integer("num_experts", low=1), hf.integer("num_experts_per_tok")
    if num_active > num_experts:
        raise ModelError(
            f"{hf.path}: num_experts_per_tok is {num_active}, want at most num_experts, which is "
            f"{num_experts}; the config is damaged"
        )
    sparse = GroupedMoeSpec(
        num_experts=num_experts,
        num_active=num_active,
        intermediate_size=hf.integer("moe_intermediate_size", low=1),
        shared_size=0,
        renormalises=hf.boolean("norm_topk_prob", default=True),
        scoring=Scoring.BIASED_SIGMOID,
        num_groups=1,
        num_active_groups=1,
        scale=hf.number("routed_scaling_factor", 1.0),
        sum_eps=SUM_EPS,
    )
    dense = MlpSpec(hf.integer("intermediate_size", low=1))
    num_dense = hf.integer("num_dense_layers")
    num_layers = hf.integer("num_hidden_layers", low=1)
    return convolutional(hf, [dense if i < num_dense else sparse for i in range(num_layers)])
