"""A tree of drafts while it grows, B rows at once, on device operations of fixed shapes.

A *candidate* is a draft that was looked at; candidates are numbered as they come, so a parent has a
lower number than its children. The *beam* is those of the last depth that are gone on from. A
candidate's score is the sum of how likely the tokens of its path are, as logarithms: never more
than its parent's. So the best candidates, ties going to the lowest number, are a tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gapless.speculative.drafter import Drafts

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.core.draft_shape import TreeShape


@dataclass(frozen=True)
class Beam:
    """The Q drafts of each row that the next pass goes on from; at first the newest token alone."""

    tokens: Tensor  # [B, Q]
    scores: Tensor  # [B, Q]
    candidates: Tensor  # [B, Q]: their numbers; -1 is the newest token
    parents: Tensor  # [B, Q]: which of the beam before they follow
    paths: Tensor  # [B, Q, depth]: tokens that lead to them, their own last
    storage: Tensor  # [Q]: where their KV lies, counted from the position after the newest token
    bits: Tensor  # [B, Q] int64: a bit for the place of each on the path, their own included


class DraftTree:
    """Grows by one depth per pass."""

    def __init__(self, shape: TreeShape, num_rows: int, device: torch.device) -> None:
        self._shape = shape
        self.depth = 0
        """Of the beam's drafts."""
        root = torch.zeros(num_rows, 1, dtype=torch.int64, device=device)
        # the newest token has its KV and counts as output: it is on no path
        self.beam = Beam(
            tokens=root,
            scores=root,
            candidates=root - 1,
            parents=root,
            paths=root[:, :, None][:, :, :0],
            storage=root[0],
            bits=root,
        )
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []

    def of_parents(self, hidden: Tensor) -> Tensor:  # [B * Q', D] -> [B * Q, D]
        """Gather what the pass before left of each draft that the beam follows."""
        by_row = hidden.view(self.beam.parents.shape[0], -1, hidden.shape[1])
        index = self.beam.parents[:, :, None].expand(-1, -1, hidden.shape[1])
        return by_row.gather(1, index).flatten(0, 1)

    def grow(
        self,
        tokens: Tensor,  # [B, Q, topk]: what may follow each draft of the beam
        logprobs: Tensor,  # [B, Q, topk]: how likely it is
    ) -> None:
        """Take in candidates, and go on from the best of them."""
        beam, topk = self.beam, self._shape.topk
        first = sum(part.shape[1] for part in self._tokens)
        scores = (beam.scores[:, :, None] + logprobs).flatten(1)
        flat = tokens.flatten(1)
        self._tokens.append(flat)
        self._scores.append(scores)
        self._parents.append(beam.candidates[:, :, None].expand_as(tokens).flatten(1))
        if len(self._tokens) == self._shape.num_steps:
            return
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :topk]
        parents = best // topk
        chosen = flat.gather(1, best)
        above = beam.paths.gather(1, parents[:, :, None].expand(-1, -1, self.depth))
        storage = torch.arange(topk, device=best.device) + self.depth * topk
        self.beam = Beam(
            tokens=chosen,
            scores=scores.gather(1, best),
            candidates=first + best,
            parents=parents,
            paths=torch.cat((above, chosen[:, :, None]), dim=2),
            storage=storage,
            bits=beam.bits.gather(1, parents) | (1 << storage),
        )
        self.depth += 1

    def best(self, count: int) -> Drafts:
        """Return the `count` best candidates, by depth and then by number."""
        scores = torch.cat(self._scores, dim=1)
        ranked = scores.sort(dim=1, descending=True, stable=True).indices
        chosen = ranked[:, :count].sort(1).values
        # number of each candidate's node, should it have one; node 0 is the newest token
        node = torch.zeros_like(ranked).scatter_(1, chosen, 1).cumsum(1)
        parents = torch.cat(self._parents, dim=1).gather(1, chosen)
        above = node.gather(1, parents.clamp(min=0)).masked_fill(parents < 0, 0)
        return Drafts(
            tokens=torch.cat(self._tokens, dim=1).gather(1, chosen),
            bits=self._ancestor_bits(torch.cat((torch.zeros_like(above[:, :1]), above), dim=1)),
        )

    def _ancestor_bits(self, parents: Tensor) -> Tensor:  # [B, W] -> [B, W]
        """Find what `draft_tree.ancestor_bits` does, depth by depth in place of node by node."""
        own = 1 << torch.arange(parents.shape[1], device=parents.device)
        bits = own.expand_as(parents)
        for _ in range(self._shape.num_steps):
            bits = bits.gather(1, parents) | own
        return bits
