"""GLM-4 mixture of experts, the small ones: DeepSeek-V3's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.core.specs.feed_forward import Scoring
from gapless.models.deepseek_v2 import build, latent_model
from gapless.models.deepseek_v3 import ignore_rules, with_next_layer
from gapless.models.feed_forward import grouped_moe, sparse_behind_dense

if TYPE_CHECKING:
    from gapless.config.hf import HfConfig
    from gapless.core.architecture import Architecture

__all__ = ["architecture", "build", "ignore_rules"]


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    mlps = sparse_behind_dense(hf, grouped_moe(hf, Scoring.BIASED_SIGMOID))
    return with_next_layer(hf, latent_model(hf, mlps))
