"""Root-mean-square norms."""

from gapless.ops.norm.reference import gated_rms_norm, rms_norm

__all__ = ["gated_rms_norm", "rms_norm"]
