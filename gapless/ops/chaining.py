"""Kernels that start while the one before them ends: programmatic dependent launch.

A step is hundreds of short kernels, each of which would be launched once the last program of the
one before it has ended. A *chained* kernel is on the device by then: it waits there until all that
came before is complete and visible, and only then lets the next kernel come. So at most two kernels
are under way, and before its wait a kernel may read nothing that the one before it writes: the
replay kernels read states, rings and a step's indices, all older than the layer's projections.

Having weights brought to the L2 cache before the wait was tried, and made steps slower.

CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; sm_90 and later.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from torch import Tensor


def chained(x: Tensor) -> dict[str, Any]:
    """Return launch settings of a kernel on x's device, `CHAINED` among them."""
    return _SETTINGS if x.is_cuda and _can_chain(x.device) else {"CHAINED": False}


_SETTINGS = {"CHAINED": True, "launch_pdl": True}


def _can_chain(device: torch.device) -> bool:
    return nvidia_capability(device) >= (9, 0)


@cache
def nvidia_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU of NVIDIA, (0, 0) for any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


@triton.jit
def await_inputs(CHAINED: tl.constexpr):
    """Wait for all kernels before this one, then let the next one start.

    Every program of a chained kernel calls it once, before it reads or writes what another writes;
    or calls both halves.
    """
    await_inputs_only(CHAINED)
    let_next_start(CHAINED)


@triton.jit
def await_inputs_only(CHAINED: tl.constexpr):
    """Wait for all kernels before this one, and hold the next one back."""
    if CHAINED:
        gdc_wait()


@triton.jit
def let_next_start(CHAINED: tl.constexpr):
    """Let the next kernel start: it may then fill the memory's queues with reads of its own."""
    if CHAINED:
        gdc_launch_dependents()
