"""Kernels that start while the one before them ends: programmatic dependent launch.

A step is hundreds of short kernels, each of which would wait for the last program of the one before
and then start cold. A *chained* kernel is launched while that one still runs. It may work out
addresses and have weights brought to the L2 cache; then it waits until everything before it is
complete and visible, and only then lets the next kernel start. So at most two kernels are under
way, and before its wait a kernel may read what never changes, and nothing else but to prefetch.

CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; sm_90 and later.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, num_threads

if TYPE_CHECKING:
    from torch import Tensor


def chained(x: Tensor) -> dict[str, Any]:
    """Return launch settings of a kernel on x's device, `CHAINED` among them."""
    return _SETTINGS if x.is_cuda and _can_chain(x.device) else {"CHAINED": False}


_SETTINGS = {"CHAINED": True, "launch_pdl": True}


@cache
def _can_chain(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def await_inputs(CHAINED: tl.constexpr):
    """Wait for all kernels before this one, then let the next one start.

    Every program of a chained kernel calls it once, before it reads or writes what another writes.
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def prefetch(pointer, end, num_bytes: tl.constexpr):
    """Bring `num_bytes` from `pointer` on to the L2 cache, each of the program's threads its part.

    Nothing at or after `end` is touched. What is asked for may be wrong, never out of bounds.
    """
    parts: tl.constexpr = num_threads()
    part: tl.constexpr = num_bytes // parts
    # the instruction takes multiples of 16 bytes at multiples of 16
    if part % 16 == 0:
        address = pointer.to(tl.int64) + tl.arange(0, parts) * part
        address = tl.minimum(address, end.to(tl.int64) - part)
        size = tl.full([parts], part, tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [address, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
