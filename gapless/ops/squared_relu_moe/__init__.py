"""Weighted sum of chosen experts without gates."""

from gapless.ops.squared_relu_moe.reference import mix_experts

__all__ = ["mix_experts"]
