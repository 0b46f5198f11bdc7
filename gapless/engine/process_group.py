"""Sums and gathers between the ranks of one machine: Gloo on the CPU, NCCL on GPUs.

Small messages of GPUs go through mailboxes (`peer_memory.py`) where the host lets them. NVLink
multicast stays off unless the environment asks for it: it is set up in switches that all GPUs of a
host share, ranks may be killed at any time, and the sums of a decode step are too small to gain by
it.

The groups are objects of their own, not the default group of `torch.distributed`, so that engines
in one process do not meet. Ranks find each other through a file in a private directory, and Gloo
connects over the loopback interface only.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from gapless.engine.peer_memory import PeerMemory, Table, open_peer_memory
from gapless.ops.peer_sum.reference import WORD_BYTES, is_gathered, is_served

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

# torch's stubs leave most of it out
c10d: Any = distributed

# how long a rank waits for the others in one call; it covers the capture of a graph
TIMEOUT = timedelta(minutes=5)
LOOPBACK = "127.0.0.1"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Meeting:
    """What a rank must know to meet the others."""

    device: str  # "cpu" or "cuda"
    file: Path
    """Made by the first rank that comes, in a directory that nobody else writes to."""
    rank: int
    world_size: int


def _trust() -> None:
    """Take it that the other ranks are there."""


class ProcessCommunicator:
    """Exchanges tensors between processes, one rank each; see `layers.placement.Communicator`."""

    def __init__(self, meeting: Meeting, check: Callable[[], None] = _trust) -> None:
        """Meet the other ranks; blocks until all are there.

        `check` is called meanwhile on a GPU, and raises if one has ended.
        """
        store = c10d.FileStore(str(meeting.file), meeting.world_size)
        store.set_timeout(TIMEOUT)
        make = _nccl if meeting.device == "cuda" else _gloo
        self._world_size = meeting.world_size
        self._group = make(store, meeting.rank, meeting.world_size)
        self.peers: PeerMemory | None = None
        if meeting.device == "cuda" and meeting.world_size > 1:
            self.peers = _peer_memory(Table(store, meeting.rank, meeting.world_size, check))
            # NCCL meets at the first call and cannot be aborted until it has: better while all are
            # known to be there than after minutes of loading
            self.group_sum(torch.zeros(1, device="cuda"))
            torch.cuda.synchronize()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks, into a new tensor or in place."""
        if self.peers is not None and is_served(x, self.peers.mailboxes.capacity):
            from gapless.ops.peer_sum.triton import peer_sum

            return peer_sum(x, self.peers.mailboxes)
        return self.group_sum(x)

    def group_sum(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks, in place, through the group whatever its size."""
        # on a GPU it is the stream that waits, not the host
        self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Put all ranks' `x` [N, C] side by side."""
        if self.peers is not None and is_gathered(x, self.peers.mailboxes.capacity):
            from gapless.ops.peer_sum.triton import peer_gather

            return peer_gather(x, self.peers.mailboxes)
        return self.group_gather(x)

    def group_gather(self, x: Tensor) -> Tensor:
        """Put all ranks' `x` [N, C] side by side, through the group whatever its size."""
        rows, columns = x.shape
        gathered = x.new_empty(self._world_size * rows, columns)
        self._group._allgather_base(gathered, x).wait()
        return gathered.view(-1, rows, columns).transpose(0, 1).reshape(rows, -1)

    def abort(self) -> None:
        """Let calls that are under way on the device end, with anything as their result."""
        if self.peers is not None:
            self.peers.stop()
        self._group.abort()

    def close(self) -> None:
        """Give memory of the device back, after `abort` and once no graph is left."""
        if self.peers is not None:
            self.peers.close()


def _peer_memory(table: Table) -> PeerMemory | None:
    found = open_peer_memory(table)
    if isinstance(found, PeerMemory):
        size = found.mailboxes.capacity * WORD_BYTES >> 10
        logger.info("messages of up to %d KiB go through mailboxes, others through NCCL", size)
        return found
    logger.warning("all messages go through NCCL, GPUs cannot write to each other: %s", found)
    return None


def _gloo(store: Any, rank: int, world_size: int) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = TIMEOUT
    return c10d.ProcessGroupGloo(store, rank, world_size, options)


def _nccl(store: Any, rank: int, world_size: int) -> Any:
    # NVLink multicast stays off unless the user wants it
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return c10d.ProcessGroupNCCL(store, rank, world_size, options)
