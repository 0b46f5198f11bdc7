"""Window read-out, fold and materialize of linear layers over checkpoint and replay ring."""

from gapless.ops.linear_replay.reference import (
    ReplayIndices,
    ReplayMemory,
    materialize,
    replay_window,
)

__all__ = ["ReplayIndices", "ReplayMemory", "materialize", "replay_window"]
