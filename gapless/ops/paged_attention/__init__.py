"""Full attention over paged keys and values."""

from gapless.ops.paged_attention.reference import PackedSegment, prefill_attention, window_attention

__all__ = ["PackedSegment", "prefill_attention", "window_attention"]
