"""Sampling with noise keyed by seed, position and token id, and what goes with it."""

from gapless.ops.sampling.edits import EditRows, edit_logits, edit_windows
from gapless.ops.sampling.logprobs import packed_logprobs
from gapless.ops.sampling.philox import gumbel_noise
from gapless.ops.sampling.reference import SamplingMode, SamplingRows, sample

__all__ = [
    "EditRows",
    "SamplingMode",
    "SamplingRows",
    "edit_logits",
    "edit_windows",
    "gumbel_noise",
    "packed_logprobs",
    "sample",
]
