"""Full attention over paged keys and values."""

from gapless.ops.paged_attention.reference import prefill_attention, window_attention

__all__ = ["prefill_attention", "window_attention"]
