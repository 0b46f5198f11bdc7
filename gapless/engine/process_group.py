"""Sums and gathers between the ranks of one machine: Gloo on the CPU, NCCL on GPUs.

The groups are objects of their own, not the default group of `torch.distributed`, so that engines
in one process do not meet. Ranks find each other through a file in a private directory, and Gloo
connects over the loopback interface only.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

# torch's stubs leave most of it out
c10d: Any = distributed

# how long a rank waits for the others in one call; it covers the capture of a graph
TIMEOUT = timedelta(minutes=5)
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Meeting:
    """What a rank must know to meet the others."""

    device: str  # "cpu" or "cuda"
    file: Path
    """Made by the first rank that comes, in a directory that nobody else writes to."""
    rank: int
    world_size: int


class ProcessCommunicator:
    """Exchanges tensors between processes, one rank each; see `layers.placement.Communicator`."""

    def __init__(self, meeting: Meeting) -> None:
        """Meet the other ranks; blocks until all are there."""
        store = c10d.FileStore(str(meeting.file), meeting.world_size)
        store.set_timeout(TIMEOUT)
        make = _nccl if meeting.device == "cuda" else _gloo
        self._world_size = meeting.world_size
        self._group = make(store, meeting.rank, meeting.world_size)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks, in place."""
        # on a GPU it is the stream that waits, not the host
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Put all ranks' `x` [N, C] side by side."""
        rows, columns = x.shape
        gathered = x.new_empty(self._world_size * rows, columns)
        self._group._allgather_base(gathered, x).wait()
        return gathered.view(-1, rows, columns).transpose(0, 1).reshape(rows, -1)

    def abort(self) -> None:
        """Let calls that are under way on the device end, with anything as their result."""
        self._group.abort()


def _gloo(store: Any, rank: int, world_size: int) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = TIMEOUT
    return c10d.ProcessGroupGloo(store, rank, world_size, options)


def _nccl(store: Any, rank: int, world_size: int) -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return c10d.ProcessGroupNCCL(store, rank, world_size, options)
