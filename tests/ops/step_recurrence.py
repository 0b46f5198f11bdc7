"""The linear layers' recurrences one token at a time, in float64: what their ops must match."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from gapless.core.specs.linear import Recurrence

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 6, 5, 3
SCALE = 0.4


@dataclass(frozen=True)
class Inputs:
    """Tensors of some tokens, as the ops get them: not scaled, and not normalised as drawn."""

    q: torch.Tensor  # [..., H, K]
    k: torch.Tensor  # [..., H, K]
    v: torch.Tensor  # [..., HV, V]
    beta: torch.Tensor | None  # [..., HV]
    log_decay: torch.Tensor  # [..., HV, Kd]

    @property
    def args(self) -> tuple[torch.Tensor | None, ...]:
        """The inputs in the ops' order."""
        return self.q, self.k, self.v, self.beta, self.log_decay


@dataclass(frozen=True)
class Tokens:
    """Inputs in float64, ready for `step`: per value head, normalised and scaled."""

    q: np.ndarray  # [..., HV, K]
    k: np.ndarray  # [..., HV, K]
    v: np.ndarray  # [..., HV, V]
    beta: np.ndarray | None  # [..., HV]
    log_decay: np.ndarray  # [..., HV, Kd]


def l2norm_eps(recurrence: Recurrence) -> float | None:
    """Return an epsilon large enough that forgetting it shows; Mamba-2 does not normalise."""
    return None if recurrence is Recurrence.MAMBA2 else 1e-2


def decay_dim(recurrence: Recurrence) -> int:
    """Return Kd."""
    return KEY_DIM if recurrence is Recurrence.KIMI_DELTA else 1


def random_inputs(
    recurrence: Recurrence,
    *lead: int,
    dtype: torch.dtype = torch.float64,
    generator: torch.Generator | None = None,
) -> Inputs:
    """Draw inputs whose decays are spread over magnitudes 0.01 to 3."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*lead, *shape, dtype=torch.float64, generator=generator)

    acc = torch.promote_types(dtype, torch.float32)
    log_decay = -torch.exp(1.2 * draw(VALUE_HEADS, decay_dim(recurrence)) - 1.5)
    beta = None if recurrence is Recurrence.MAMBA2 else draw(VALUE_HEADS).sigmoid().to(acc)
    return Inputs(
        draw(KEY_HEADS, KEY_DIM).to(dtype),
        draw(KEY_HEADS, KEY_DIM).to(dtype),
        draw(VALUE_HEADS, VALUE_DIM).to(dtype),
        beta,
        log_decay.to(acc),
    )


def zero_state() -> np.ndarray:
    """Return the state before the first token."""
    return np.zeros((VALUE_HEADS, VALUE_DIM, KEY_DIM))


def normalised(inputs: Inputs, eps: float | None) -> Inputs:
    """Return inputs with q and k normalised in float64, if at all, and rounded to their dtype."""
    q, k = (torch.from_numpy(_unit(x.double().numpy(), eps)) for x in (inputs.q, inputs.k))
    return replace(inputs, q=q.to(inputs.q.dtype), k=k.to(inputs.k.dtype))


def tokens_of(inputs: Inputs, eps: float | None) -> Tokens:
    """Widen, normalise unless that has been done, scale, and repeat key heads."""
    q, k, v, beta, log_decay = (None if x is None else x.double().numpy() for x in inputs.args)
    assert q is not None
    assert k is not None
    assert v is not None
    assert log_decay is not None
    group = VALUE_HEADS // KEY_HEADS
    q, k = _unit(q, eps) * SCALE, _unit(k, eps)
    return Tokens(np.repeat(q, group, -2), np.repeat(k, group, -2), v, beta, log_decay)


def step(state: np.ndarray, tokens: Tokens, *at: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the state [HV, V, K] after the token at an index, and its output [HV, V]."""
    k = tokens.k[at]
    state = state * np.exp(tokens.log_decay[at])[:, None, :]
    d = tokens.v[at]
    if tokens.beta is not None:
        d = tokens.beta[at][:, None] * (d - (state * k[:, None]).sum(-1))
    state = state + d[:, :, None] * k[:, None, :]
    return state, (state * tokens.q[at][:, None]).sum(-1)


def _unit(x: np.ndarray, eps: float | None) -> np.ndarray:
    if eps is None:
        return x
    unit: np.ndarray = x / np.sqrt((x * x).sum(-1, keepdims=True) + eps)
    return unit


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bit for bit, NaN equal to the same NaN."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
