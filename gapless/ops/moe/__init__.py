"""Mixture of experts: routing, and the weighted sum of the chosen experts."""

from gapless.ops.moe.reference import mix_experts, route

__all__ = ["mix_experts", "route"]
