"""Sampling with noise keyed by seed, position and token id."""

from gapless.ops.sampling.philox import gumbel_noise
from gapless.ops.sampling.reference import SamplingRows, sample

__all__ = ["SamplingRows", "gumbel_noise", "sample"]
