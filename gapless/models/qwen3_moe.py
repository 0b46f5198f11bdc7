"""Qwen3 mixture of experts: Qwen3's attention, experts without a shared one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.models.feed_forward import sparse_mlps
from gapless.models.qwen3 import build, full_attention, ignore_rules

if TYPE_CHECKING:
    from gapless.config.hf import HfConfig
    from gapless.core.architecture import Architecture

__all__ = ["architecture", "build", "ignore_rules"]


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    mlps = sparse_mlps(hf, renormalises=hf.boolean("norm_topk_prob", default=False))
    return full_attention(hf, mlps, has_qk_norm=True)
