"""A stream for host plans, so that their copies run beside the drafting of the step before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class PlanStream:
    """Runs plans on a stream of its own; the stream of the step waits for them.

    What a plan writes must not be in use by then: that holds for the buffers of verify, since a
    plan is made from lengths that the step before settled after its own verify. On a CPU plans run
    where they stand.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._joined = torch.cuda.Event() if is_cuda else None

    def run(self, plan: Callable[[], None]) -> None:
        """Run a plan beside what has been launched, and join what is launched next to it."""
        if self._stream is None or self._joined is None:
            plan()
            return
        with torch.cuda.stream(self._stream):
            plan()
            self._joined.record()
        torch.cuda.current_stream().wait_event(self._joined)
