"""Short depthwise causal convolution."""

from gapless.ops.causal_conv.reference import causal_conv

__all__ = ["causal_conv"]
