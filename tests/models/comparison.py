"""What a tiny model's served logits are compared with: oracles, made once, and the tolerances."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from tests.models import tiny
from tests.models.reference import logits

if TYPE_CHECKING:
    from torch import Tensor

    from tests.models.driver import TeacherForced

NUM_TOKENS = 70
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}


@dataclass(frozen=True)
class Case:
    """One comparison: a tiny model, its weights, and the type that it is served in."""

    name: str
    dtype: str
    scaled: bool

    def __str__(self) -> str:
        return f"{self.name}-{self.dtype}"

    @property
    def tolerance(self) -> float:
        """Largest difference of logits."""
        return TOLERANCE[self.dtype]


@cache
def tiny_model(name: str, scaled: bool) -> Any:
    """Return the transformers model, the same object each time."""
    _, model = tiny.build(name, scaled=scaled, seed=tiny.VETTED_SEED)
    return model


@cache
def token_ids() -> list[list[int]]:
    """Return three rows of `NUM_TOKENS` tokens."""
    generator = torch.Generator().manual_seed(7)
    ids: list[list[int]] = torch.randint(2, 256, (3, NUM_TOKENS), generator=generator).tolist()
    return ids


@cache
def oracle(case: Case) -> Tensor:
    """Return transformers' logits `[3, NUM_TOKENS, vocabulary]` of `token_ids`."""
    model = tiny_model(case.name, case.scaled)
    return logits(model, torch.tensor(token_ids()), getattr(torch, case.dtype))


def assert_served_right(forced: TeacherForced, case: Case, *, slot: int, row: int = 0) -> None:
    """Check the logits of every token that a slot has run, which are those of a row."""
    found, expected = forced.all_logits(slot).double(), oracle(case)[row].double()
    error = (found - expected[: found.shape[0]]).abs().max()
    assert error <= case.tolerance, f"logits differ by {error:.2e}, at most {case.tolerance:.0e}"
