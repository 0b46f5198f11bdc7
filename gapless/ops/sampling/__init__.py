"""Sampling with noise keyed by seed, position and token id."""

from gapless.ops.sampling.philox import gumbel_noise
from gapless.ops.sampling.reference import SamplingMode, SamplingRows, sample

__all__ = ["SamplingMode", "SamplingRows", "gumbel_noise", "sample"]
