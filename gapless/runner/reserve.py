"""The device memory that weights and pools leave over, and what of a step lies in it.

Static buffers come first: slot table, masks, workspaces. What a step makes as it runs is kept by
its graph, and all graphs share one pool, so steps take what the largest takes. Warming up runs and
captures the largest of each kind, so memory that does not suffice shows before the first request.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gapless.core.footprint import human
from gapless.errors import ConfigError
from gapless.ops import linear_replay

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from gapless.attention.backend import AttentionBackend
    from gapless.config.config import Config
    from gapless.core.specs.linear import LinearSpec
    from gapless.ops.step_metadata import Geometry


@dataclass(frozen=True)
class StepMemory:
    """Bytes of what is large in the largest decode step, one after the other and not together."""

    logits: int
    """Of all window tokens, in float32; edits, masks and log-probabilities make copies."""
    attention: int
    """Partial results of one layer."""
    recurrence: int
    """What one layer's first launch says to its second."""

    @classmethod
    def of(
        cls,
        geometry: Geometry,
        backend: AttentionBackend,
        linear_specs: Collection[LinearSpec],
        *,
        vocab_size: int,
        max_len: int,
        device: str,
    ) -> StepMemory:
        """Find the sizes for all slots of a rank.

        Args: linear_specs: of the rank's part. max_len: positions that a window reads at most.
        """
        rows, window = geometry.num_slots, geometry.max_window
        records = [
            linear_replay.window_bytes(rows, window, geometry.num_replayed, spec, device=device)
            for spec in linear_specs
        ]
        return cls(
            logits=4 * rows * window * vocab_size,
            attention=backend.window_bytes(rows, window, max_len),
            recurrence=max(records, default=0),
        )

    def __str__(self) -> str:
        return ", ".join(f"{name} {human(size)}" for name, size in vars(self).items())


@contextmanager
def within_memory(config: Config) -> Iterator[None]:
    """Say what to do where an engine's start takes more memory than its device has.

    Raises:
        ConfigError: it does.
    """
    try:
        yield
    except RuntimeError as error:
        cause = _out_of_memory(error)
        if cause is None:
            raise
        raise ConfigError(
            f"{str(cause).partition('. GPU')[0]}: what mem_fraction leaves over does not hold the "
            f"steps of {config.max_running_requests} requests with windows of {config.max_window} "
            f"tokens, and prompts of {config.chunked_prefill_size}; lower mem_fraction, "
            "max_running_requests or chunked_prefill_size"
        ) from error


def _out_of_memory(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """Find it beneath what ending a capture made of it."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error
