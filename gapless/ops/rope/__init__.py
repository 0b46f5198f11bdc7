"""Rotary position embedding."""

from gapless.ops.rope.reference import apply_rotary, rotary_table

__all__ = ["apply_rotary", "rotary_table"]
