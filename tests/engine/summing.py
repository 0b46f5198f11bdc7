"""Runners for processes of ranks, in a module that is imported quickly: each process does so."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
import torch

from gapless.core.plan import StepPlan, StepResult

if TYPE_CHECKING:
    from gapless.layers.placement import Communicator


class SummingRunner:
    """A runner whose step sums one number over the ranks, or fails as a plan says."""

    def __init__(self, rank: int, communicator: Communicator) -> None:
        self.rank, self.communicator = rank, communicator

    def run(self, plan: StepPlan) -> SummingRunner:
        if plan.step_id == 7 and self.rank == 1:
            raise ValueError("seven is too much")
        if plan.step_id == 5 and self.rank and not gc.get_freeze_count():
            raise ValueError("the collector goes through all that a rank has made")
        if plan.step_id == 8 and self.rank == 0:
            raise ValueError("eight is too much")
        own = torch.full((2, 1), float(plan.step_id + self.rank))
        self.gathered = self.communicator.all_gather(own)
        self.total = self.communicator.all_reduce(own)
        return self

    def wait(self) -> StepResult:
        found = self.total[:, 0].numpy().astype(np.int32)
        return StepResult(found, self.gathered.numpy().astype(np.int32), found, found)


def summing(rank: int, communicator: Communicator) -> SummingRunner:
    return SummingRunner(rank, communicator)


def failing(rank: int, communicator: Communicator) -> SummingRunner:
    raise MemoryError(f"rank {rank} has no room")
