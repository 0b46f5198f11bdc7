"""Index tensors of one decode step, from the slot list and the slot table."""

from gapless.ops.step_metadata.reference import (
    Geometry,
    SlotColumns,
    StepConstants,
    WindowIndices,
    kv_entries,
    window_indices,
)

__all__ = [
    "Geometry",
    "SlotColumns",
    "StepConstants",
    "WindowIndices",
    "kv_entries",
    "window_indices",
]
