"""Draft trees as bit masks, on torch operations.

Node 0 of a window is its newest token, and every other node comes after its parent. A node's
*storage* position is the tree's first position plus its number, its *logical* position that of the
newest token plus its depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# bits of an int64 that can be shifted without touching the sign
MAX_NODES = 63


@dataclass(frozen=True)
class TreeMask:
    """What the queries of each row may attend to beyond the positions that all of them see."""

    start: Tensor  # [B] int64: storage position of node 0; every position below it is seen
    bits: Tensor  # [B, Q] int64: bit j of a query is set where it sees position start + j


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
