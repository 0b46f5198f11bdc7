"""Llama: full attention without q/k norm in every layer, plain rotary embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gapless.models.decoder import head_rules
from gapless.models.feed_forward import dense_mlps
from gapless.models.loader import IgnoreRule
from gapless.models.qwen3 import build, full_attention

if TYPE_CHECKING:
    from gapless.config.hf import HfConfig
    from gapless.core.architecture import Architecture

__all__ = ["architecture", "build", "ignore_rules"]


def architecture(hf: HfConfig) -> Architecture:
    """Read the model's description from its config."""
    return full_attention(hf, dense_mlps(hf), has_qk_norm=False)


def ignore_rules(spec: Architecture) -> list[IgnoreRule]:
    """Tensors that are recognised and not loaded."""
    frequencies = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    return [*head_rules(spec), IgnoreRule(frequencies, "rotary frequencies come from the config")]
