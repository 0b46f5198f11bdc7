"""Qwen3.5 mixture of experts: the dense model's layers with experts and a shared one."""

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
    return hybrid_attention(hf, sparse_mlps(hf, renormalises=True), has_grouped_rows=False)
