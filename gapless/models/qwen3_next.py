"""Qwen3-Next: Qwen3.5's layers with experts; linear layers store projections by key head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.models.feed_forward import sparse_mlps
from gapless.models.qwen3_5 import build, hybrid_attention, ignore_rules

if TYPE_CHECKING:
    from gapless.config.hf import HfConfig
    from gapless.core.architecture import Architecture

__all__ = ["architecture", "build", "ignore_rules"]


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    mlps = sparse_mlps(hf, renormalises=hf.boolean("norm_topk_prob", default=True))
    return hybrid_attention(hf, mlps, has_grouped_rows=True)
