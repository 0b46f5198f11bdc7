"""Sum and gather over ranks, and the mailboxes through which they send; the definitions.

Each rank writes what it has into a mailbox of every other rank, and adds up, or puts side by side,
what it finds in its own. A 64-bit entry carries 32 bits of data and the number of the call, so an
entry that has come is seen to have come: one way over the link, no barrier. Calls take turns with
two sets of mailboxes. A rank that sends in call n + 2 has what the others sent in call n + 1, so
they have done with call n, whose mailboxes it writes to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# entries that one program sends and awaits; its mailboxes and its count of calls are its own
PROGRAM_WORDS = 512
WORD_BYTES = 4
ENTRY_BYTES = 8
NUM_TURNS = 2


@dataclass(frozen=True)
class Mailboxes:
    """One rank's view of all mailboxes."""

    rank: int
    addresses: Tensor  # [world_size] int64: on its device, where each rank's mailboxes begin
    num_calls: Tensor  # [capacity / PROGRAM_WORDS] int32: calls that each program took part in
    is_stopped: Tensor  # [1] int32 in pinned host memory: not 0, and nobody waits any more
    capacity: int  # 32-bit words of the largest message

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.addresses.shape[0]


def num_bytes(world_size: int, capacity: int) -> int:
    """Size of one rank's mailboxes: entries [NUM_TURNS, world_size, capacity], 0 at first."""
    return NUM_TURNS * world_size * capacity * ENTRY_BYTES


def num_programs(capacity: int) -> int:
    """Programs of the largest message."""
    return -(-capacity // PROGRAM_WORDS)


def peer_sum(
    terms: Sequence[Tensor],  # one of each rank, all of one shape
) -> Tensor:  # in their dtype
    """Add up the terms in float32 and in the order of ranks, and round once.

    So every rank gets the same bits, whichever terms come first.
    """
    total = terms[0].float()
    for term in terms[1:]:
        total = total + term.float()
    return total.to(terms[0].dtype)


def peer_gather(
    parts: Sequence[Tensor],  # one of each rank, [N, C] all
) -> Tensor:  # [N, world_size * C]
    """Put the parts side by side, in the order of ranks, bit for bit."""
    return torch.cat(list(parts), dim=1)


def is_served(x: Tensor, capacity: int) -> bool:
    """Whether a message can go through mailboxes of `capacity`: its type, its layout, its size."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not x.is_contiguous():
        return False
    size, start = x.numel() * x.element_size(), x.storage_offset() * x.element_size()
    return size % WORD_BYTES == start % WORD_BYTES == 0 and 0 < size <= capacity * WORD_BYTES


def is_gathered(x: Tensor, capacity: int) -> bool:
    """Whether [N, C] can be gathered through mailboxes of `capacity`: rows of whole words too."""
    return is_served(x, capacity) and x.shape[1] * x.element_size() % WORD_BYTES == 0
