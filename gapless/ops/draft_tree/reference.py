"""Draft trees as bit masks, and compaction to an accepted path, on torch operations.

Node 0 of a window is its newest token, and every other node comes after its parent. A node's
*storage* position is the tree's first position plus its number, its *logical* position that of the
newest token plus its depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

# bits of an int64 that can be shifted without touching the sign
MAX_NODES = 63


@dataclass(frozen=True)
class TreeMask:
    """What the queries of each row may attend to beyond the positions that all of them see."""

    start: Tensor  # [B] int64: storage position of bit 0; every position below it is seen
    bits: Tensor  # [B, Q] int64, rows contiguous: whether a query sees position start + j


def ancestor_bits(parents: Tensor) -> Tensor:
    """Return for parents [B, W] the masks [B, W] of each node and its ancestors.

    `parents[:, i] < i`; what stands in column 0 is not read.
    """
    bits = [torch.ones_like(parents[:, 0])]
    for node in range(1, parents.shape[1]):
        before = torch.stack(bits, dim=1)
        inherited = before.gather(1, parents[:, node : node + 1])[:, 0]
        bits.append(inherited | (1 << node))
    return torch.stack(bits, dim=1)


def unpack(bits: Tensor, num_nodes: int) -> Tensor:
    """Return masks [B, Q] as booleans [B, Q, num_nodes]."""
    nodes = torch.arange(num_nodes, device=bits.device)
    return (bits[:, :, None] >> nodes) & 1 == 1


def depths(bits: Tensor, num_nodes: int) -> Tensor:
    """Return each node's distance [B, W] from node 0, from `ancestor_bits`."""
    return unpack(bits, num_nodes).sum(-1) - 1


def nth_ancestors(bits: Tensor, distances: Tensor) -> Tensor:
    """Return each node's ancestors [D, B, W] at distances [D], from `ancestor_bits` [B, W].

    A node is its own ancestor at distance 0; -1 stands where the path is shorter.
    """
    num_nodes = bits.shape[1]
    related = unpack(bits, num_nodes)
    # of an ancestor j: members of the path from j down to the node, both included, less one
    distance = related.flip(-1).cumsum(-1).flip(-1) - 1
    found = related & (distance == distances[:, None, None, None])
    after = torch.arange(1, num_nodes + 1, device=bits.device)
    return (found * after).sum(-1) - 1


def compact(
    pools: Sequence[Tensor],  # [layers, entries, ...] each, written
    read: Tensor,  # [B, W] int64 entries
    write: Tensor,  # [B, W] int64 entries
) -> None:
    """Set entry `write[b, i]` of every pool and layer to what entry `read[b, i]` held at entry.

    A row may read what it writes, in any order. What one row writes no other row reads or writes,
    save entries that stay where they are, `read == write`, such as those of padded rows.
    """
    for pool in pools:
        pool.index_copy_(1, write.view(-1), pool.index_select(1, read.view(-1)))
