"""Latent attention over paged entries."""

from gapless.ops.mla.reference import prefill_latent_attention, window_latent_attention

__all__ = ["prefill_latent_attention", "window_latent_attention"]
