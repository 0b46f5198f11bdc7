"""Marks on a stream of work."""

from __future__ import annotations

import torch


class Event:
    """When what stands before it on the current stream has passed; on a CPU it always has."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        """Mark this point of the current stream."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Block the host until the marked point has passed."""
        if self._event is not None:
            self._event.synchronize()
