"""One torch thread, and the step-by-step recurrence that the linear ops are held against."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from gapless.core.architecture import Recurrence

Array = np.ndarray


@dataclass(frozen=True)
class Token:
    """Inputs of one token, float64, as the op gets them: neither normalised nor scaled."""

    q: Array  # [H, K]
    k: Array  # [H, K]
    v: Array  # [HV, V]
    beta: Array | None  # [HV]
    g: Array  # [HV, Kd]


@dataclass(frozen=True)
class StepRecurrence:
    """The recurrence of design.md section 3, one token at a time."""

    recurrence: Recurrence
    l2norm_eps: float | None
    scale: float

    def __call__(self, state: Array, token: Token) -> tuple[Array, Array]:
        """Return the state [HV, V, K] after a token, and its output [HV, V]."""
        group = state.shape[0] // token.q.shape[0]
        q = np.repeat(self._unit(token.q) * self.scale, group, axis=0)
        k = np.repeat(self._unit(token.k), group, axis=0)
        state = state * np.exp(token.g)[:, None, :]
        d = token.v
        if self.recurrence is not Recurrence.MAMBA2:
            assert token.beta is not None, "the delta rules have a beta"
            d = token.beta[:, None] * (token.v - np.einsum("hvk,hk->hv", state, k))
        state = state + d[:, :, None] * k[:, None, :]
        return state, np.einsum("hvk,hk->hv", state, q)

    def _unit(self, x: Array) -> Array:
        if self.l2norm_eps is None:
            return x
        unit: Array = x / np.sqrt((x * x).sum(-1, keepdims=True) + self.l2norm_eps)
        return unit


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_token() -> type[Token]:
    """Return the class of one token's inputs."""
    return Token


@pytest.fixture
def make_recurrence() -> Callable[[Recurrence], StepRecurrence]:
    """Return a function from a recurrence to its step function; eps is large enough to matter."""

    def make(recurrence: Recurrence) -> StepRecurrence:
        eps = None if recurrence is Recurrence.MAMBA2 else 1e-2
        return StepRecurrence(recurrence, eps, scale=0.4)

    return make
